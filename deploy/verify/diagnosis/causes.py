"""The causes, likeliest first, and which causes explain which others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deploy.verify.diagnosis import engine_causes, request_causes, server_causes, store_causes
from deploy.verify.diagnosis.evidence import Evidence
from deploy.verify.report import Diagnosis

# Seen whenever KV does not arrive.
_NOT_THERE = ("not_stored",)
# Seen whenever Redis does not work.
_OF_A_SICK_STORE = ("store_evicts", "store_fails", "stores_late", "not_stored")
_OF_KEYS = ("layout_differs", *_NOT_THERE)
# Engines that compute differently answer differently even if nothing was loaded.
_OF_NUMBERS = ("kv_differs", "stale_kv", *_NOT_THERE)


class Cause(NamedTuple):
    """A rule, the code of the cause it finds, and the codes that this cause explains."""

    code: str
    rule: Callable[[Evidence], Diagnosis | None]
    explains: tuple[str, ...] = ()


# Reported for a prompt even if nothing is wrong.
HIDES = Cause("prefix_cache_hides", request_causes.prefix_cache_hides)
CAUSES = (
    Cause("prompt_under_chunk", request_causes.short_prompts, ("prefix_cache_hides",)),
    Cause(
        "store_unreachable", store_causes.unreachable,
        ("keys_lost", "request_failed", *_OF_A_SICK_STORE),
    ),
    Cause(
        "shared_memory_full", server_causes.no_shared_memory,
        ("engine_died", "request_failed", "router_bypasses_producers", "stores_late", *_NOT_THERE),
    ),
    Cause(
        "engine_died", engine_causes.ended,
        ("request_failed", "router_bypasses_producers", "stores_late", *_NOT_THERE),
    ),
    Cause(
        "engine_restarted", engine_causes.ended,
        ("request_failed", "router_bypasses_producers", "stores_late", *_NOT_THERE),
    ),
    Cause(
        "connector_not_loaded", engine_causes.connector,
        ("hash_algorithm_differs", "known_bad_pair", "stores_late", *_OF_KEYS),
    ),
    Cause(
        "fix_not_applied", engine_causes.fixes,
        ("kv_differs", "known_bad_pair", "layout_differs", "stores_late", *_NOT_THERE),
    ),
    Cause("lmcache_differs", server_causes.versions, ("engine_unknown", *_NOT_THERE)),
    Cause("engine_unknown", server_causes.forgets, _NOT_THERE),
    Cause("self_differs", request_causes.contradicts_itself, ("kv_differs", "stale_kv")),
    # New KV is wrong, too, so that its age explains nothing.
    Cause("kv_differs", request_causes.wrong_kv, ("stale_kv",)),
    Cause("stale_kv", request_causes.stale_kv),
    Cause("store_differs", engine_causes.redis_address, _NOT_THERE),
    Cause("namespace_differs", engine_causes.namespace, _NOT_THERE),
    Cause("model_differs", engine_causes.model, ("layout_differs", *_OF_NUMBERS)),
    Cause("tp_differs", engine_causes.tensor_parallel, ("layout_differs", *_OF_NUMBERS)),
    Cause("chunk_size_differs", engine_causes.chunk_size, _OF_KEYS),
    Cause("hash_seed_differs", engine_causes.hash_seeds, ("hash_algorithm_differs", *_NOT_THERE)),
    Cause("hash_algorithm_differs", engine_causes.hash_algorithm, _NOT_THERE),
    Cause("layout_differs", engine_causes.layout, _OF_NUMBERS),
    Cause("engine_differs", engine_causes.identity, _OF_NUMBERS),
    Cause("store_denied", store_causes.denied, _OF_A_SICK_STORE),
    Cause("store_read_only", store_causes.read_only, ("keys_lost", *_OF_A_SICK_STORE)),
    Cause("store_full", store_causes.full, _OF_A_SICK_STORE),
    Cause(
        "keys_lost", store_causes.lost_keys, ("engine_unknown", "request_failed", *_OF_A_SICK_STORE)
    ),
    Cause("store_evicts", store_causes.evicts, _NOT_THERE),
    Cause("server_full", server_causes.full, _NOT_THERE),
    Cause("values_refused", store_causes.refused_values),
    Cause("store_fails", store_causes.fails, ("stores_late", *_NOT_THERE)),
    Cause("stores_late", store_causes.late, _NOT_THERE),
    Cause("request_failed", request_causes.failed, ("router_bypasses_producers", *_NOT_THERE)),
    Cause("router_bypasses_producers", request_causes.router),
    Cause("known_bad_pair", engine_causes.bad_pair, ("kv_differs", *_NOT_THERE)),
    Cause("not_stored", store_causes.not_stored),
    HIDES,
)  # fmt: skip
# If nothing else fits, the first of these that does.
LAST_RESORTS = (
    Cause("store_evicts", store_causes.perhaps_evicts),
    Cause("server_full", server_causes.perhaps_evicts),
    Cause("not_found", request_causes.not_found),
    Cause("unexplained", request_causes.unexplained),
)
CODES = tuple(dict.fromkeys(cause.code for cause in (*CAUSES, *LAST_RESORTS)))


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    """Return the causes that fit the evidence, likeliest first; none for a healthy stack."""
    rules = CAUSES if _is_wrong(evidence) else (HIDES,)
    found = [(cause, said) for cause in rules if (said := cause.rule(evidence))]
    found = [(cause, said) for cause, said in found if said.code == cause.code]
    explained = {code for cause, _ in found for code in cause.explains}
    causes = [said for cause, said in found if cause.code not in explained]
    if causes:
        return causes
    return list(filter(None, (cause.rule(evidence) for cause in LAST_RESORTS)))[:1]


def _is_wrong(evidence: Evidence) -> bool:
    """Return whether anything needs explaining; a flush or a full Redis alone does not."""
    return bool(
        evidence.missed
        or evidence.mismatched
        or evidence.stale
        or evidence.contradicting
        or evidence.failed_requests
        or evidence.bypassed
        or evidence.too_short
        or evidence.refused
        or evidence.store.refusal
        or not evidence.store.reachable
        or any(engine.ended or engine.restarted or engine.left_out for engine in evidence.engines)
        or any(prompt.under_chunk or prompt.missed for prompt in evidence.prompts)
    )
