"""Each cause from its evidence, and none where nothing is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from deploy.verify.diagnosis import (
    CODES,
    EngineFacts,
    Evidence,
    ServerFacts,
    StoreFacts,
    diagnose,
)
from deploy.verify.diagnosis.causes import CAUSES, LAST_RESORTS
from deploy.verify.own_prompt import OwnPrompt
from tests.conftest import REPO

KV = {
    "model": "/models/tiny",
    "world_size": 1,
    "chunk_size": 256,
    "layerwise": False,
    "hash_algorithm": "sha256_cbor",
    "hash_root": "4c2d",
    "dtype": "bfloat16",
    "layers": 4,
    "planes": 2,
    "heads": 2,
    "head_size": 64,
    "client": "pdkit",
    "redis": "127.0.0.1:8001/0",
    "namespace": "pdkit:demo:1",
    "layout": "6129",
}
PRODUCER = EngineFacts(
    "producer-0", "producer", "0", fixes={"B17": "applied", "B2b": "not needed"}, kv=KV, failures={}
)
CONSUMER = EngineFacts("consumer-0", "consumer", "0", fixes={"B17": "applied"}, kv=KV, failures={})
HEALTHY = Evidence(
    stack="demo",
    engines=(PRODUCER, CONSUMER),
    store=StoreFacts(policy="allkeys-lru", max_memory_bytes=1 << 30),
    chunk_size=256,
    stored_chunks=6,
    expected_chunks=6,
)
# Engines that share KV through LMCache's server report less.
MP_KV = {"client": "lmcache-mp", "lmcache": "0.5.6", "model": "/models/tiny", "world_size": 1,
         "chunk_size": 256}  # fmt: skip
MP_ENGINES = (
    replace(
        PRODUCER, connector="PatchedLMCacheMPConnector", fixes={}, kv={**MP_KV, "instances": [6, 7]}
    ),
    replace(
        CONSUMER, connector="PatchedLMCacheMPConnector", fixes={}, kv={**MP_KV, "instances": [8]}
    ),
)
SERVER = ServerFacts("kv-server", 1024, lmcache="0.5.6", engines=(6, 7, 8))
SERVER_STORE = StoreFacts(services=("kv-server",), name="LMCache's server")
NO_NUMBERS = 'HTTP 400: {"message": "Out of range float values are not JSON compliant: nan"}'
PROMPT = OwnPrompt("producer-0", "consumer-0", 811, 256, local=0, loaded=768)


def consumer(**changes: Any) -> dict[str, Any]:
    """Return the evidence of a stack whose consumer is another."""
    return {"engines": (PRODUCER, replace(CONSUMER, **changes))}


def producer(**changes: Any) -> dict[str, Any]:
    return {"engines": (replace(PRODUCER, **changes), CONSUMER)}


def kv(**changes: Any) -> dict[str, Any]:
    """Return the evidence of a stack whose consumer reports other KV."""
    return consumer(kv={**KV, **changes})


def store(**changes: Any) -> dict[str, Any]:
    return {"store": replace(HEALTHY.store, **changes)}


def server(*, store: StoreFacts = SERVER_STORE, **changes: Any) -> dict[str, Any]:
    """Return the evidence of a stack that shares KV through LMCache's server."""
    return {"engines": MP_ENGINES, "server": replace(SERVER, **changes), "store": store}


def found(**changes: Any) -> list[Any]:
    return diagnose(replace(HEALTHY, **changes))


def codes(**changes: Any) -> list[str]:
    return [cause.code for cause in found(**changes)]


def rows(producers: dict[str, str], consumers: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return evidence of engines that run what these rows say."""
    same = {"dtype": "bfloat16", "context": "any"}
    engines = (
        replace(PRODUCER, kv={**KV, "rows": {**same, **producers}}),
        replace(CONSUMER, kv={**KV, "rows": {**same, **consumers}, **more}),
    )
    return {"engines": engines}


# evidence → the cause it must lead to, where tokens were missed, and words of its message.
CAUSE: dict[str, tuple[dict[str, Any], str, str]] = {
    "no room for a chunk": ({"too_short": "no room"}, "prompt_under_chunk", "no room"),
    "the user's prompt is short": (
        {"prompts": (replace(PROMPT, tokens=3, loaded=0),)}, "prompt_under_chunk", "3 tokens",
    ),
    "redis gone": (store(reachable=False), "store_unreachable", "Redis"),
    "LMCache's server hangs": (
        server(store=replace(SERVER_STORE, reachable=False), lmcache="", engines=None),
        "store_unreachable", "LMCache's server does not answer",
    ),
    "LMCache's server started anew": (
        server(store=replace(SERVER_STORE, restarted=True), engines=()), "keys_lost",
        "LMCache's server ended during the check",
    ),
    "LMCache's server of another version": (
        server(lmcache="0.5.5"), "lmcache_differs", "producer-0, consumer-0 0.5.6; kv-server 0.5.5",
    ),
    "LMCache's server forgot an engine": (
        server(engines=(6, 7)), "engine_unknown", "does not know consumer-0",
    ),
    "no room in LMCache's server": (
        server(no_room=3), "server_full", "had no room (1024 MiB) for 3 chunks",
    ),
    "LMCache's server makes room": (
        server(evictions=1), "server_full", "is full (1024 MiB) and dropped KV during the check",
    ),
    "no shared memory for an engine that ended": (
        {**server(shm_free_mib=100, shm_engine_mib=512),
         "engines": (MP_ENGINES[0], replace(MP_ENGINES[1], ended=True))},
        "shared_memory_full", "512 MiB of /dev/shm, which has 100 MiB free",
    ),
    "an engine gone": (
        consumer(ended=True, hash_seed="", connector=None), "engine_died",
        "consumer-0 exited during",
    ),
    "an engine anew": (consumer(restarted=True), "engine_restarted", "consumer-0 was restarted"),
    "no connector": (consumer(connector="", fixes={}), "connector_not_loaded", "no KV connector"),
    "another connector": (
        consumer(connector="LMCacheConnectorV1", fixes={}),
        "connector_not_loaded",
        "consumer-0 runs vLLM's LMCacheConnectorV1",
    ),
    "vLLM's own copy": (consumer(use_native=True), "connector_not_loaded", "use_native"),
    "fix disabled": (
        producer(fixes={"B17": "disabled"}), "fix_not_applied", "fix B17 is disabled in producer-0",
    ),
    "fix failed": (
        consumer(fixes={"B17": "failed"}), "fix_not_applied", "fix B17 is failed in consumer-0",
    ),
    "no report": (
        producer(fixes={}, connector=None, failures=None), "fix_not_applied",
        "no report of the patched connector",
    ),
    "another redis": (
        kv(redis="10.0.0.9:6379/0"), "store_differs",
        "producer-0 127.0.0.1:8001/0; consumer-0 10.0.0.9:6379/0",
    ),
    "another name space": (
        kv(namespace="pdkit:other:1"), "namespace_differs", "consumer-0 pdkit:other:1",
    ),
    "another model": (kv(model="/models/link"), "model_differs", "consumer-0 /models/link"),
    "another tp": (kv(world_size=2, heads=1, layout="77"), "tp_differs", "consumer-0 2"),
    "another chunk size": (
        kv(chunk_size=128, layout="78"), "chunk_size_differs", "consumer-0 128; the plan says 256",
    ),
    "another chunk size in all": (
        {"chunk_size": 64}, "chunk_size_differs", "producer-0, consumer-0 256; the plan says 64",
    ),
    "seeds differ": (
        consumer(hash_seed="1", kv={**KV, "hash_root": "9"}),
        "hash_seed_differs",
        "consumer-0 has 1",
    ),
    "no seed at all": (
        {"engines": (replace(PRODUCER, hash_seed=""), replace(CONSUMER, hash_seed=""))},
        "hash_seed_differs",
        "producer-0, consumer-0 has none",
    ),
    "one without a seed": (consumer(hash_seed=""), "hash_seed_differs", "consumer-0 has none"),
    "another hash": (
        kv(hash_algorithm="builtin"), "hash_algorithm_differs", "consumer-0 builtin",
    ),
    "another root": (kv(hash_root="0"), "hash_algorithm_differs", "different numbers"),
    "another type": (
        kv(dtype="float32", layout="79"), "layout_differs", "element type: producer-0 bfloat16",
    ),
    "layerwise in one": (kv(layerwise=True), "layout_differs", "layerwise: producer-0 False"),
    "layout of another kind": (kv(layout="80"), "layout_differs", "layout digest"),
    "no client": (kv(client="none"), "layout_differs", "consumer-0 none"),
    "another vLLM": (
        rows({"vllm": "0.25.1"}, {"vllm": "0.26.0"}, unplanned={"vllm": "0.25.1"}),
        "engine_differs",
        "vllm: producer-0 0.25.1; consumer-0 0.26.0 (0.25.1 was planned)",
    ),
    "a row in one only": (rows({"lora": "8"}, {}), "engine_differs", "consumer-0 unknown"),
    "denied a command": (
        producer(failures={"noperm": 4}, left_out=6, said="storing failed: ReplyError: NOPERM x"),
        "store_denied",
        "producer-0 4 x noperm, with the message 'storing failed: ReplyError: NOPERM x'",
    ),
    "denied the log-in": (
        store(reachable=False, refusal="invalid username-password pair", denied=True),
        "store_denied",
        "invalid username",
    ),
    "read-only": (
        producer(failures={"readonly": 3}, left_out=6), "store_read_only", "3 x readonly",
    ),
    "full": (
        {
            **producer(failures={"oom": 2}, left_out=6),
            **store(policy="noeviction", max_memory_bytes=5 << 20, evicted=3),
        },
        "store_full",
        "Redis is full (maxmemory 5 MiB) and its maxmemory-policy is noeviction",
    ),
    "full, by redis' own word": (
        {
            "engines": (replace(PRODUCER, failures=None), replace(CONSUMER, failures=None)),
            **store(errors={"OOM": 7}),
        },
        "store_full",
        "redis 7 x oom",
    ),
    "flushed": (store(flushes=2), "keys_lost", "flushed"),
    "restarted": (store(restarted=True), "keys_lost", "restarted"),
    "deleted": ({"vanished": 3}, "keys_lost", "deleted 3 keys"),
    "evicted while it was awaited": (
        {**store(evicted=9), "vanished": 2}, "store_evicts", "evicted 9 keys",
    ),
    "evicted, and too small all the same": (
        {**producer(failures={"oom": 1}, left_out=1), **store(evicted=9), "stored_chunks": 1},
        "store_evicts", "evicted 9 keys",
    ),
    "evicted at once": ({**store(evicted=9), "stored_chunks": 1}, "store_evicts", "1024 MiB"),
    "evicted, and nothing else": (store(evicted=5), "store_evicts", "evicted 5"),
    "corrupt values": ({"refused": 2}, "values_refused", "2 values"),
    "redis fails": (
        {**producer(failures={"timeout": 3}, left_out=4, said="storing failed: TimeoutError: x"),
         "not_loaded": 2},
        "store_fails",
        "producer-0: 3 x timeout, 4 chunks not stored, which says 'storing failed: TimeoutError: "
        "x'; 2 chunks not loaded",
    ),
    "redis says so": (store(refusal="MISCONF x"), "store_fails", "it says 'MISCONF x'"),
    "no room in the queue": (producer(left_out=4), "store_fails", "no call failed, 4 chunks"),
    "late": (producer(late=2, failures={}), "stores_late", "2 of producer-0"),
    "request failed": (
        {"failed_requests": {"consumer-0": "HTTP 500"}},
        "request_failed",
        "consumer-0 did not answer: HTTP 500",
    ),
    "no numbers": (
        {"failed_requests": {"consumer-0": NO_NUMBERS, "router": NO_NUMBERS}},
        "kv_differs",
        "consumer-0, router computed NaN or infinite values",
    ),
    "a producer's own are none": (
        {"failed_requests": {"consumer-0": NO_NUMBERS, "producer-0": NO_NUMBERS}},
        "request_failed",
        "consumer-0 did not answer",
    ),
    "router": ({"bypassed": True}, "router_bypasses_producers", "without a prefill"),
    "bad pair": ({"bad_pair": "vLLM 0.32.0 with x"}, "known_bad_pair", "vLLM 0.32.0 with x"),
    "not stored": ({"stored_chunks": 2}, "not_stored", "only 2 of 6 chunks"),
    "nothing stored": ({"stored_chunks": 0}, "not_stored", "only 0 of 6 chunks"),
    "own cache": (
        {"prompts": (replace(PROMPT, local=800, loaded=0),)},
        "prefix_cache_hides",
        "800 of 811 tokens in consumer-0",
    ),
    "wrong KV": ({"mismatched": True}, "kv_differs", "differ from recomputed ones"),
    "wrong KV of its own": (
        {"contradicting": ("producer-0",), "mismatched": True},
        "self_differs",
        "producer-0 answered a prompt from its own prefix cache differently",
    ),
    "stale KV": (
        {"stale": "the store has damaged KV", "emptying": "FLUSHDB"},
        "stale_kv",
        "the store has damaged KV",
    ),
    "found by nobody": ({}, "not_found", "all compared settings agree"),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSE)
def test_a_cause_from_its_evidence(case: str) -> None:
    changes, code, words = CAUSE[case]
    first, *others = found(missed=True, **changes)
    assert first.code == code
    assert words in first.message
    assert first.hint
    assert others == [], "one thing was wrong, and one cause is named"


def test_every_cause_has_a_case() -> None:
    assert {code for _, code, _ in CAUSE.values()} | {"unexplained"} == set(CODES)


def test_codes_are_unique_and_what_is_explained_exists() -> None:
    codes = [cause.code for cause in CAUSES]
    assert len(codes) == len(set(codes))
    for cause in (*CAUSES, *LAST_RESORTS):
        assert set(cause.explains) <= set(CODES) - {cause.code}


# What is a failure by itself, though every token was found.
ALONE = (
    "no room for a chunk", "the user's prompt is short", "redis gone", "an engine gone",
    "an engine anew", "denied a command", "denied the log-in", "redis says so", "read-only", "full",
    "corrupt values", "redis fails", "no room in the queue", "request failed", "router",
    "no numbers", "a producer's own are none", "own cache", "stale KV",
    "wrong KV", "wrong KV of its own",
    "evicted, and too small all the same", "LMCache's server hangs",
    "no shared memory for an engine that ended",
)  # fmt: skip


@pytest.mark.parametrize("case", CAUSE)
def test_there_is_no_cause_if_nothing_failed(case: str) -> None:
    """Others may flush or evict, answers may leave early: no hit was lost by it."""
    changes, code, _ = CAUSE[case]
    assert codes(**changes) == ([code] if case in ALONE else [])


def test_where_new_kv_is_wrong_too_the_age_of_old_kv_explains_nothing() -> None:
    assert codes(stale="the store has damaged KV", mismatched=True) == ["kv_differs"]


@pytest.mark.parametrize("case", ["another model", "another tp", "a row in one only"])
def test_engines_that_compute_differently_say_nothing_of_old_kv(case: str) -> None:
    changes, code, _ = CAUSE[case]
    assert codes(stale="the store has KV of another model", **changes) == [code]


def test_a_healthy_stack_has_none() -> None:
    assert diagnose(HEALTHY) == []
    assert codes(prompts=(PROMPT,)) == []


def test_wrong_kv_is_named_even_if_something_else_is_wrong() -> None:
    """A miss is computed again and changes no answer, so it explains no difference."""
    assert codes(mismatched=True) == ["kv_differs"]
    assert codes(mismatched=True, missed=True) == ["kv_differs"]
    evicted = store(evicted=3)
    assert codes(mismatched=True, missed=True, stored_chunks=5, **evicted) == [
        "kv_differs", "store_evicts",
    ]  # fmt: skip
    assert codes(mismatched=True, failed_requests={"router": "HTTP 500"}) == [
        "kv_differs", "request_failed",
    ]  # fmt: skip


def test_engines_that_compute_differently_do_not_count_as_wrong_kv() -> None:
    apart = kv(dtype="float32")
    assert codes(missed=True, mismatched=True, **apart) == ["layout_differs"]


def test_a_log_without_its_beginning_is_not_a_missing_report() -> None:
    assert codes(missed=True, **producer(fixes={})) == ["not_found"]
    counted = producer(fixes={}, connector=None)
    assert codes(missed=True, **counted) == ["not_found"]


def test_an_unexplained_failure_is_quoted() -> None:
    (cause,) = found(failures=["router was restarted during the check", "and more"])
    assert cause.code == "unexplained"
    assert "router was restarted" in cause.message and "deploy status" in cause.hint


def test_a_prompt_that_the_consumer_has_itself_is_a_note_and_hides_nothing() -> None:
    own = (replace(PROMPT, local=800, loaded=0),)
    flushed = store(flushes=1)
    assert codes(prompts=own, **flushed) == ["prefix_cache_hides"]


@pytest.mark.parametrize(
    "seen", [{"mismatched": True}, {"failed_requests": {"consumer-0": NO_NUMBERS}}]
)
def test_wrong_kv_of_a_pair_that_is_known_for_it(seen: dict[str, Any]) -> None:
    assert codes(**seen, bad_pair="B6") == ["known_bad_pair"]


def test_wrong_kv_with_a_fix_switched_off_is_that_fix() -> None:
    assert codes(mismatched=True, **producer(fixes={"B17": "disabled"})) == ["fix_not_applied"]


def test_the_likeliest_comes_first() -> None:
    engines = (
        replace(PRODUCER, fixes={"B17": "failed"}),
        replace(CONSUMER, hash_seed="1"),
    )
    seen = codes(missed=True, **store(reachable=False), engines=engines, stored_chunks=0)
    assert seen == ["store_unreachable", "fix_not_applied", "hash_seed_differs"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (store(flushes=1), "keys_lost"),
        (consumer(hash_seed="1"), "hash_seed_differs"),
        (producer(failures={"oom": 1}, late=3, left_out=2), "store_full"),
        (producer(failures={"timeout": 1}, late=3, left_out=2), "store_fails"),
        (producer(ended=True, late=3), "engine_died"),
        (producer(connector="", fixes={}, late=3), "connector_not_loaded"),
    ],
)
def test_a_cause_hides_what_it_explains(changes: dict[str, Any], code: str) -> None:
    """A store that fails, answers that leave early and KV that is not there follow from it."""
    assert codes(missed=True, stored_chunks=0, **changes) == [code]


def test_a_full_redis_that_evicts_does_not_outrank_what_is_wrong() -> None:
    """It always evicts: what nobody asks for any more makes room."""
    for changes, code in ((consumer(hash_seed="1"), "hash_seed_differs"),
                          ({"bypassed": True}, "router_bypasses_producers"),
                          (producer(late=2), "stores_late")):  # fmt: skip
        assert codes(missed=True, **store(evicted=500), **changes) == [code]
    assert codes(**store(evicted=500)) == [], "every token was found"


def test_an_engine_without_the_connector_is_not_asked_for_its_fixes() -> None:
    """What its log says of them is of an earlier start."""
    seen = codes(missed=True, **consumer(connector="LMCacheConnectorV1", fixes={"B17": "disabled"}))
    assert seen == ["connector_not_loaded"]


def test_a_healthy_lmcache_server_is_not_a_cause() -> None:
    assert codes(missed=True, **server()) == ["not_found"]
    assert codes(**server(evictions=9, no_room=9)) == [], "nothing was missed"


def test_an_engine_of_which_the_server_does_not_know_a_rank_is_named() -> None:
    assert codes(missed=True, **server(engines=(6, 8))) == ["engine_unknown"]


def test_an_engine_of_another_host_has_another_server() -> None:
    away = (MP_ENGINES[0], replace(MP_ENGINES[1], hash_seed=None))
    assert codes(missed=True, **{**server(engines=(6, 7)), "engines": away}) == ["not_found"]


def test_missing_facts_of_lmcaches_server_are_not_a_cause() -> None:
    """An engine of another kit reports no instance, and one that ended is known to nobody."""
    assert codes(missed=True, **server(lmcache="", engines=None)) == ["not_found"]
    kv = {**MP_KV, "lmcache": "unknown"}
    older = {"engines": tuple(replace(engine, kv=kv) for engine in MP_ENGINES)}
    assert codes(missed=True, **{**server(engines=()), **older}) == ["not_found"]
    died = {"engines": (MP_ENGINES[0], replace(MP_ENGINES[1], ended=True))}
    assert codes(missed=True, **{**server(engines=(6, 7)), **died}) == ["engine_died"]


@pytest.mark.parametrize("free_mib", [512, None])
def test_an_engine_that_ended_and_has_room_just_died(free_mib: int | None) -> None:
    died = {"engines": (MP_ENGINES[0], replace(MP_ENGINES[1], ended=True))}
    seen = {**server(shm_free_mib=free_mib, shm_engine_mib=512), **died}
    assert codes(missed=True, **seen) == ["engine_died"]
    full = server(shm_free_mib=0, shm_engine_mib=512)
    assert codes(missed=True, **full) == ["not_found"], "those that run have theirs"


def test_a_server_of_lmcache_that_makes_room_does_not_outrank_what_is_wrong() -> None:
    """What it drops is in Redis, as a rule."""
    assert codes(missed=True, **server(evictions=9), bypassed=True) == ["router_bypasses_producers"]


@pytest.mark.parametrize(
    ("gone", "command"), [(True, "deploy up --resume"), (False, "deploy restart kv-server")]
)
def test_a_server_of_lmcache_that_does_not_answer_is_started_again(
    gone: bool, command: str
) -> None:
    silent = replace(SERVER_STORE, reachable=False, restarted=gone)
    (cause,) = found(missed=True, **server(store=silent))
    assert cause.code == "store_unreachable"
    assert cause.hint == f"deploy logs kv-server --name demo; {command} --name demo"


def test_unreported_facts_are_not_a_difference() -> None:
    """Another release of LMCache tells less."""
    assert codes(missed=True, **consumer(kv={"chunk_size": 256, "model": None})) == ["not_found"]


def test_a_cause_names_all_its_engines() -> None:
    engines = [EngineFacts(name, hash_seed="0", fixes={"B17": "failed"}) for name in ("a", "b")]
    (cause,) = found(missed=True, engines=engines)
    assert "a, b" in cause.message


@pytest.mark.parametrize("state", ["applied", "not needed", "not applicable", "guarded"])
def test_states_that_are_not_a_cause(state: str) -> None:
    assert codes(missed=True, **producer(fixes={"B17": state})) == ["not_found"]


@pytest.mark.parametrize(("by_spec", "words"), [(True, "engine.env"), (False, "unset PDKIT")])
def test_a_fix_that_is_switched_off_is_switched_on_where_it_was(by_spec: bool, words: str) -> None:
    (cause,) = found(missed=True, disabled_by_spec=by_spec, **producer(fixes={"B17": "disabled"}))
    assert words in cause.hint


def test_redis_word_is_not_taken_where_engines_count_themselves() -> None:
    """It counts what it answers to everybody."""
    assert codes(missed=True, **store(errors={"OOM": 7, "NOPERM": 2})) == ["not_found"]


def test_hints_name_the_stack_and_start_the_same_again() -> None:
    """`deploy up` alone would start the default stack beside it."""
    for changes, _, _ in CAUSE.values():
        for cause in found(missed=True, stack="mine", **changes):
            for command in re.findall(r"deploy (?:up|down|logs|check|status|swap)\b[^;,)]*",
                                      cause.hint):  # fmt: skip
                assert "--name mine" in command, cause.hint


@pytest.mark.parametrize(
    ("changes", "ours", "theirs"),
    [
        (store(reachable=False), "deploy logs redis --name demo", "redis.url_file"),
        (store(evicted=5), "raise redis.memory_gib", "raise maxmemory of that Redis"),
        (store(refusal="no", denied=True), "ACL LIST", "correct redis.url_file"),
        (producer(failures={"oom": 1}), "raise redis.memory_gib", "CONFIG SET maxmemory-policy"),
        (producer(failures={"readonly": 1}), "pdkit's Redis was made a replica", "redis.url_file"),
        (producer(failures={"timeout": 1}), "deploy logs redis", "redis.url_file"),
    ],
)
def test_hints_on_a_redis_of_the_users_own(changes: dict[str, Any], ours: str, theirs: str) -> None:
    """It has no log here, and no size that the kit sets."""
    hint = ""
    for user_supplied, words in ((False, ours), (True, theirs)):
        seen = replace(HEALTHY, missed=True, **changes)
        hint = diagnose(replace(seen, store=replace(seen.store, user_supplied=user_supplied)))[
            0
        ].hint
        assert words in hint
    assert "logs redis" not in hint
    assert "memory_gib" not in hint


class TestTheReference:
    """docs/reference/diagnosis.md says of every cause what it is, how it is seen, what fixes it."""

    PAGE = (REPO / "docs" / "reference" / "diagnosis.md").read_text(encoding="utf-8")

    def sections(self) -> dict[str, str]:
        parts = re.split(r"^## `(\w+)`$", self.PAGE, flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    def test_the_page_has_every_cause_in_order(self) -> None:
        assert tuple(self.sections()) == CODES

    @pytest.mark.parametrize("word", ["**Means**", "**Seen by**", "**Fix**"])
    def test_the_page_has_each_label_once_for_each_cause(self, word: str) -> None:
        assert [code for code, text in self.sections().items() if text.count(word) != 1] == []

    def test_the_page_says_which_causes_hide_others(self) -> None:
        """The sentence is made from the table of causes, and checked against it."""
        explains: dict[str, tuple[str, ...]] = {}
        for cause in CAUSES:
            explains[cause.code] = cause.explains
        for code, text in self.sections().items():
            wanted = ", ".join(f"`{one}`" for one in explains.get(code, ()))
            told = re.search(r"\*\*Hides\*\* (?P<codes>[^.]*)\.", " ".join(text.split()))
            assert (told["codes"] if told else "") == wanted, code


def test_engines_of_equal_rows_are_no_cause() -> None:
    """Nor are rows that other causes name."""
    assert codes(missed=True, **rows({"vllm": "1"}, {"vllm": "1"})) == ["not_found"]
    assert "engine_differs" not in codes(missed=True, **rows({"model": "a"}, {"model": "b"}))
    # What all run is not why one found nothing of another's; `deploy doctor` names it.
    alike = rows({"vllm": "2"}, {"vllm": "2"}, unplanned={"vllm": "1"})
    assert "engine_differs" not in codes(missed=True, **alike)
