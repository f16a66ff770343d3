"""From what was measured to a cause: why KV did not arrive, and the next command to type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.verify.report import Diagnosis
from deploy.verify.store_path import StorePath


@dataclass(frozen=True)
class Evidence:
    """What the rules look at, gathered while the check ran.

    Attributes:
        stack: its name, for hints.
        hash_seeds: engine → PYTHONHASHSEED it really runs with; "" where it has none.
        fixes: engine → fix id → state, as its connector reported at start; empty where it did not.
        store_reachable: Redis answered before and after.
        stored_chunks, expected_chunks: chunks seen to arrive in Redis, and those prompts held.
        flushes, evicted: during the check.
        store_restarted: Redis has another run id than at the start of the check.
        failed_requests: engine → what it answered.
        missed: some eligible tokens were not loaded.
        mismatched: some answers differ.
        bypassed: the router sent prompts to no producer.
        too_short: why no prompt can have a whole chunk.
        restarted: engines that were started anew during the check.
        path: what went to and from Redis during the check; None where the kit does not count it.
        redis_brought: Redis is the user's own, and has no log here.
        disabled_by_spec: fixes are switched off by the stack's own settings, and no shell's.
    """

    stack: str
    hash_seeds: Mapping[str, str]
    fixes: Mapping[str, Mapping[str, str]]
    store_reachable: bool
    stored_chunks: int
    expected_chunks: int
    flushes: int
    evicted: int
    store_restarted: bool
    failed_requests: Mapping[str, str]
    missed: bool
    mismatched: bool
    bypassed: bool = False
    too_short: str = ""
    restarted: Sequence[str] = ()
    redis_brought: bool = False
    disabled_by_spec: bool = False
    path: StorePath | None = None


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    """Return the causes that the evidence supports, likeliest first; none for a healthy stack."""
    wrong = (
        evidence.missed,
        evidence.mismatched,
        evidence.failed_requests,
        evidence.bypassed,
        evidence.too_short,
        evidence.restarted,
    )
    if not any(wrong) and not _lost(evidence.path):
        return []
    found = [cause for rule in _RULES if (cause := rule(evidence))]
    return found or [_unexplained(evidence)]


def _store(evidence: Evidence) -> Diagnosis | None:
    if evidence.store_reachable:
        return None
    return Diagnosis(
        "store_unreachable",
        "Redis does not answer, so nothing can be stored or found",
        f"see to the Redis of redis.url_file; deploy status --name {evidence.stack} asks it again"
        if evidence.redis_brought
        else f"deploy logs redis --name {evidence.stack}",
    )


def _fixes(evidence: Evidence) -> Diagnosis | None:
    off: dict[str, list[str]] = {}
    for engine, states in evidence.fixes.items():
        if not states:
            off.setdefault("no report of the patched connector", []).append(engine)
        for fix, state in states.items():
            if state in ("disabled", "failed"):
                off.setdefault(f"fix {fix} is {state}", []).append(engine)
    if not off:
        return None
    said = "; ".join(f"{what} in {_join(engines)}" for what, engines in off.items())
    unset = (
        "take PDKIT_DISABLE_FIXES out of engine.env in deploy.yaml"
        if evidence.disabled_by_spec
        else "unset PDKIT_DISABLE_FIXES"
    )
    return Diagnosis(
        "fix_not_applied",
        f"the connector cannot move KV as it should: {said}",
        f"{unset}; deploy down --name {evidence.stack}; deploy up --name {evidence.stack}",
    )


def _hash_seeds(evidence: Evidence) -> Diagnosis | None:
    by_seed: dict[str, list[str]] = {}
    for engine, seed in evidence.hash_seeds.items():
        by_seed.setdefault(seed, []).append(engine)
    if len(by_seed) < 2 and "" not in by_seed:
        return None
    said = "; ".join(
        f"{_join(engines)} {'has none' if not seed else f'has {seed}'}"
        for seed, engines in by_seed.items()
    )
    return Diagnosis(
        "hash_seed_differs",
        f"PYTHONHASHSEED is not the same in all engines, so their keys never match: {said}",
        f"deploy down --name {evidence.stack}; deploy up --name {evidence.stack}",
    )


def _lost_keys(evidence: Evidence) -> Diagnosis | None:
    if evidence.store_restarted:
        what = "Redis was restarted during the check and lost its keys"
    elif evidence.flushes:
        what = f"Redis was flushed during the check ({evidence.flushes} times)"
    elif evidence.evicted:
        what = f"Redis evicted {evidence.evicted} keys during the check: it is full"
    else:
        return None
    return Diagnosis(
        "keys_lost",
        f"{what}, between a prefill that stored KV and a decode that asked for it",
        ("raise maxmemory of that Redis" if evidence.redis_brought else "raise redis.memory_gib")
        if evidence.evicted
        else f"deploy check --name {evidence.stack}, with nobody flushing Redis",
    )


def _lost(path: StorePath | None) -> bool:
    return path is not None and bool(path.refused or path.left_out)


def _refused(evidence: Evidence) -> Diagnosis | None:
    if evidence.path is None or not evidence.path.refused:
        return None
    return Diagnosis(
        "values_refused",
        f"{evidence.path.refused:.0f} values in Redis were not what was stored (corrupt, cut or "
        "another's); their chunks were computed again",
        f"deploy logs --name {evidence.stack}, and look for 'a value is not used'",
    )


def _store_fails(evidence: Evidence) -> Diagnosis | None:
    path = evidence.path
    if path is None or not (path.failures or path.left_out):
        return None
    return Diagnosis(
        "store_fails",
        f"Redis failed {path.failures:.0f} calls of the engines; {path.left_out:.0f} chunks were "
        f"not stored and {path.not_loaded:.0f} not loaded",
        f"deploy logs --name {evidence.stack}, and look for 'pdkit-connector WARNING Redis'",
    )


def _requests(evidence: Evidence) -> Diagnosis | None:
    if not evidence.failed_requests:
        return None
    engine, answer = next(iter(evidence.failed_requests.items()))
    return Diagnosis(
        "request_failed",
        f"{engine} did not answer: {answer}",
        f"deploy logs {engine} --name {evidence.stack}",
    )


def _router(evidence: Evidence) -> Diagnosis | None:
    if not evidence.bypassed:
        return None
    return Diagnosis(
        "router_bypasses_producers",
        "the router answers without a prefill on a producer, so nothing is shared",
        f"deploy logs router --name {evidence.stack}",
    )


def _short_prompts(evidence: Evidence) -> Diagnosis | None:
    if not evidence.too_short:
        return None
    return Diagnosis(
        "prompt_under_chunk",
        evidence.too_short,
        f"set a smaller lmcache.chunk_size in deploy.yaml; deploy down --name {evidence.stack}; "
        f"deploy up --name {evidence.stack}",
    )


def _restarts(evidence: Evidence) -> Diagnosis | None:
    if not evidence.restarted:
        return None
    return Diagnosis(
        "engine_restarted",
        f"{_join(evidence.restarted)} died during the check and was started anew",
        f"deploy logs {evidence.restarted[0]} --name {evidence.stack}",
    )


def _nothing_stored(evidence: Evidence) -> Diagnosis | None:
    if evidence.stored_chunks >= evidence.expected_chunks or evidence.flushes:
        return None
    return Diagnosis(
        "not_stored",
        f"of {evidence.expected_chunks} chunks {evidence.stored_chunks} reached Redis",
        f"deploy logs --name {evidence.stack}, and look for 'put error'",
    )


def _unexplained(evidence: Evidence) -> Diagnosis:
    if evidence.mismatched and not evidence.missed:
        return Diagnosis(
            "kv_differs",
            "KV was found and loaded, yet the answers differ from recomputed ones: it is wrong",
            f"deploy down --name {evidence.stack}, and do not serve from it",
        )
    return Diagnosis(
        "not_found",
        "KV reached Redis and the consumer did not find it, though seeds and fixes agree",
        f"deploy logs --name {evidence.stack}, and compare the model names in LMCache's metadata",
    )


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)


# Likeliest first.
_RULES = (
    _short_prompts,
    _store,
    _fixes,
    _hash_seeds,
    _lost_keys,
    _refused,
    _store_fails,
    _restarts,
    _requests,
    _router,
    _nothing_stored,
)
