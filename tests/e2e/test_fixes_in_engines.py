"""The fixes at work in real engines: what ends or misleads an engine without them does not with.

Two stacks. `layered` moves KV layer by layer. `small` has a KV space that its requests overflow and
room for six chunks on their way to Redis. Both save what consumers decode. The last test of each
class turns fixes off and shows what they are for; it leaves its engines dead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml

import deploy as package
from bench.store_gate import held, writes_held
from deploy.runtime.engine_api import ApiError
from deploy.stack.service import Service
from deploy.verify.equivalence import compare
from tests.e2e.conftest import Deploy, eventually, running_stack
from tests.e2e.engines import (
    CHUNK,
    LMCACHE_API,
    VLLM_DEV_API,
    Engines,
    all_of,
    assert_same,
    in_environ,
)
from tests.e2e.store_vandals import behind_each_store, spoil
from tests.e2e.traffic import Users, chat, text
from tests.ports import free_row

# The monitor looks twice a second instead of twice a minute.
REACHED = {**LMCACHE_API, "LMCACHE_EXTRA_CONFIG": '{"ping_interval": 0.5}'}
BATCH = 512  # tokens a step: longer prompts are prefilled in pieces
LAYERS = 4
REMOTE = 'lmcache.storage_manager.storage_backends["RemoteBackend"]'


def brought_up(
    folder: Path, name: str, port: int, spec: dict[str, object], *options: str
) -> Iterator[Engines]:
    # LMCache's own way to Redis, which most of the fixes correct.
    spec = {**spec, "redis": {"client": "lmcache"}}
    (folder / "stack.yaml").write_text(yaml.safe_dump(spec))
    kit = Deploy(folder)
    with running_stack(kit, name, port, "-f", str(folder / "stack.yaml"), *options, "--no-check"):
        yield Engines(kit, name, port)


def ask_around_a_hole(engines: Engines, prompt: str, lost: list[bytes]) -> list[int]:
    """Lose keys, then let the consumer answer three times, each right; return the chunks found.

    vLLM counts what is found, also where a chunk then cannot be loaded and is computed.
    """
    reference = engines.ask("producer-0", prompt)
    assert engines.store().delete(*lost) == len(lost)
    found = []
    for _ in range(3):
        engines.forget()
        answer, hits = engines.ask_counting("consumer-0", prompt)
        assert_same(reference, answer)
        found.append(hits // CHUNK)
    return found


@pytest.fixture(scope="class")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start engines, and again with variables that engine.env refuses."""
    for engines in brought_up(
        tmp_path_factory.mktemp("layered"),
        "layered",
        free_row(),
        {"engine": {"args": ["--max-num-batched-tokens", str(BATCH)], "env": VLLM_DEV_API}},
        "--layerwise",
        "--save-decode-cache",
    ):
        engines.restart({"producer-0": REACHED, "consumer-0": REACHED})
        yield engines


def layer_of(key: bytes) -> int:
    """Return the layer that a key of LMCache's own client names, behind the data type."""
    found = re.search(rb"@(?:bfloat16|float)@(\d+)@", key)
    assert found, key
    return int(found[1])


class TestLayered:
    def test_ten_chatting_users_are_all_answered(self, layered: Engines) -> None:
        """Growing histories, prompts below a chunk and above a batch, and clients that leave."""
        before = layered.pids()
        seen = chat(layered.url("front"), Users())
        assert seen.refused == []
        assert (seen.answers, seen.left) == (34, 6)
        assert seen.longest > 2 * BATCH
        # On a busy machine some lookups give up, and the check below counts exactly.
        assert layered.metric("consumer-0", "vllm:external_prefix_cache_hits_total") > 4 * CHUNK
        assert layered.pids() == before
        data = layered.kit.ok("check", "--name", layered.name)
        assert data["passed"] and data["hit_rate"]["eligible_rate"] == 1.0
        assert data["hit_rate"]["hits"] == data["hit_rate"]["eligible"] > 1000
        assert data["equivalence"]["mismatched"] == 0
        # One key a layer, not one a chunk: it really goes layer by layer.
        keys = layered.store().keys()
        assert len({layer_of(key) for key in keys}) == LAYERS

    @pytest.mark.parametrize("lost", ["one layer", "all layers", "payload of one layer"])
    def test_a_load_ends_before_the_first_missing_chunk(self, layered: Engines, lost: str) -> None:
        """What is loaded ends before the chunk that is gone."""
        prompt = text(4 * CHUNK + 50, lost)
        keys = layered.keys_by_chunk(prompt)[2]
        assert len(keys) == 2 * LAYERS
        third = [key for key in keys if layer_of(key) == 2]
        payload = [key for key in third if key.endswith(b"kv_bytes")]
        gone = {"one layer": third, "all layers": keys, "payload of one layer": payload}[lost]
        # LMCache looks for the first layer only before it stores: other layers stay lost.
        found = {"one layer": [2, 2, 2], "all layers": [2, 4, 4], "payload of one layer": [4, 2, 2]}
        assert ask_around_a_hole(layered, prompt, gone) == found[lost]
        assert layered.is_alive("consumer-0")

    def test_a_frozen_producer_answers_and_stores_again_once_thawed(self, layered: Engines) -> None:
        """A frozen producer answers and stores nothing; thawed, it stores again."""
        layered.store().flushall()
        layered.lmcache("producer-0", "PUT", "/freeze/enable")
        try:
            for number in range(3):
                layered.ask("producer-0", text(700, ("frozen", number)))
            assert layered.store().dbsize() == 0
        finally:
            layered.lmcache("producer-0", "PUT", "/freeze/disable")
        self._assert_shared(layered, text(700, "thawed"))

    @pytest.mark.parametrize("whom", ["producer-0", "consumer-0"])
    def test_an_unhealthy_engine_answers_without_the_store_and_recovers(
        self, layered: Engines, whom: str
    ) -> None:
        """An engine whose store is ill answers without it, and uses it again once it is well.

        The Redis connector has no ping, and layerwise loads are not among those whose failures the
        health monitor counts, so no state of Redis makes a layerwise engine unhealthy. The count is
        raised inside the engine; that the monitor acts on it, and how it recovers, is LMCache's.
        """
        make_unhealthy(layered, whom)
        for number in range(3):
            layered.ask(whom, text(700, (whom, number)), 300)
        assert not is_healthy(layered, whom)
        recover_after(layered, whom, 0)
        assert eventually(lambda: is_healthy(layered, whom))
        self._assert_shared(layered, text(700, ("well again", whom)))

    def _assert_shared(self, engines: Engines, prompt: str) -> None:
        reference = engines.ask("producer-0", prompt)
        assert eventually(lambda: engines.store().dbsize() >= 2 * 2 * LAYERS)
        answer, hits = engines.ask_counting("consumer-0", prompt)
        assert_same(reference, answer)
        assert hits == 2 * CHUNK

    def test_engines_die_without_the_fixes(self, layered: Engines) -> None:
        """Without B7 a hole ends a consumer, without B2c illness, without B2b freezing a producer.

        Fixes that would catch it are off as well: B18, which reports what was not loaded, and B2g,
        which keeps any error of a store inside the store. Where a chunk is gone LMCache hands its
        mover fewer chunks than slots, which the CPU mover refuses.
        """
        layered.restart(
            {
                "producer-0": {**REACHED, "PDKIT_DISABLE_FIXES": "B2b,B2g"},
                "consumer-0": {**REACHED, "PDKIT_DISABLE_FIXES": "B7,B18"},
            }
        )
        prompt = text(4 * CHUNK + 50, "a hole to death")
        third = [key for key in layered.keys_by_chunk(prompt)[2] if layer_of(key) == 2]
        layered.store().delete(*(key for key in third if key.endswith(b"kv_bytes")))
        layered.forget()
        self._assert_ends(layered, "consumer-0", prompt, "1 of 4 memory objects are missing")
        layered.lmcache("producer-0", "PUT", "/freeze/enable")
        self._assert_ends(layered, "producer-0", text(700, "frozen to death"), "StopIteration")
        layered.restart({"consumer-0": {**REACHED, "PDKIT_DISABLE_FIXES": "B2c,B2g"}})
        make_unhealthy(layered, "consumer-0")
        self._assert_ends(layered, "consumer-0", text(700, "ill to death"), "StopIteration")

    def _assert_ends(self, engines: Engines, whom: str, prompt: str, reason: str) -> None:
        with pytest.raises(ApiError):
            engines.ask(whom, prompt)
        assert engines.dies(whom)
        assert reason in engines.kit.log(engines.name, whom)


def is_healthy(engines: Engines, whom: str) -> bool:
    return engines.run_inside(whom, "result = lmcache.is_healthy()") == "True"


def make_unhealthy(engines: Engines, whom: str) -> None:
    """Count ten failed loads, as plain loads do, and wait until the health monitor sees them."""
    recover_after(engines, whom, 3600)
    engines.run_inside(whom, f"{REMOTE}._get_blocking_failed_count += 10")
    assert eventually(lambda: not is_healthy(engines, whom))


def recover_after(engines: Engines, whom: str, seconds: int) -> None:
    """Set how long the health monitor waits before it looks whether the store is well again."""
    setting = f"extra_config['waiting_time_for_recovery'] = {seconds}"
    engines.run_inside(whom, f"{REMOTE}.config.{setting}")


@pytest.fixture(scope="class")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from brought_up(
        tmp_path_factory.mktemp("small"),
        "small",
        free_row(),
        {
            "save_decode_cache": True,
            "lmcache": {"staging_gib": 3 / 1024},  # six chunks
            "engine": {
                "dtype": "bfloat16",
                "kv_cache_gib": 0.0055,  # 2883 tokens
                "max_model_len": 2560,
                "args": ["--max-num-batched-tokens", str(BATCH)],
                "env": VLLM_DEV_API,
            },
        },
    )


class TestSmall:
    def test_a_second_turn_loads_the_first_answer(self, small: Engines) -> None:
        """Of a second turn the consumer loads the chunk that it decoded in the first.

        A consumer that saves runs as `kv_both`, since `kv_consumer` never stores. So it must be
        allowed to write to Redis: SET of chunks that it decoded, beside what every consumer does,
        EXISTS and GET, and DEL of a chunk whose payload is gone.
        """
        small.store().flushall()
        first = text(300, "first turn")
        answer = small.ask("front", first, 300)
        decoded = "".join(chr(int(token.removeprefix("token_id:"))) for token in answer.tokens)
        assert eventually(lambda: small.store().dbsize() >= 4)
        small.forget()
        second = first + decoded + text(100, "second turn")
        before = small.metric("consumer-0", "vllm:external_prefix_cache_hits_total")
        got = small.ask("front", second)
        loaded = small.metric("consumer-0", "vllm:external_prefix_cache_hits_total") - before
        assert len(first) // CHUNK * CHUNK == CHUNK, "the first prompt is one chunk and a part"
        assert loaded == 2 * CHUNK
        assert_same(small.recomputed(second), got)

    def test_preempted_requests_get_correct_answers(self, small: Engines) -> None:
        wrong, preempted = crowd(small, "crowd")
        assert preempted > 0
        assert wrong == []

    @pytest.mark.parametrize("lost", ["both keys", "payload"])
    def test_a_load_ends_before_the_first_missing_chunk(self, small: Engines, lost: str) -> None:
        prompt = text(4 * CHUNK + 50, lost)
        keys = small.keys_by_chunk(prompt)[2]
        assert len(keys) == 2
        gone = keys if lost == "both keys" else [k for k in keys if k.endswith(b"kv_bytes")]
        # What it computed again, it stored again.
        found = {"both keys": [2, 4, 4], "payload": [4, 4, 4]}
        assert ask_around_a_hole(small, prompt, gone) == found[lost]
        assert small.is_alive("consumer-0")

    def test_prompt_that_does_not_fit_the_staging_memory(self, small: Engines) -> None:
        """Seven chunks, and six fit on their way: stored and loaded in pieces, none is left out."""
        prompt = text(7 * CHUNK + 100, "long")
        reference = small.recomputed(prompt)
        small.store().flushall()
        small.forget()
        small.ask("producer-0", prompt)
        small.forget()
        answer, hits = small.ask_counting("consumer-0", prompt)
        assert_same(reference, answer)
        assert hits == 7 * CHUNK
        assert small.is_alive("consumer-0")
        assert self._is_shared(small, text(600, "short again"))

    def test_answers_are_correct_if_redis_stalls_while_staging_memory_is_full(
        self, small: Engines
    ) -> None:
        assert stall(small, "stalled", "no memory is available") == [True] * 2
        assert self._is_shared(small, text(600, "after the stall"))

    def test_check_notices_wrong_kv(self, small: Engines) -> None:
        """LMCache's own way to Redis has no checksum: noise hits, and only the answers tell."""
        small.store().flushall()
        with behind_each_store(small.store(), spoil()) as spoiled:
            ran = small.kit.run("check", "--quick", "--name", small.name, "--json")
        assert sum(spoiled) > 0
        assert ran.code == 1, ran
        assert ran.data["equivalence"]["mismatched"] > 0
        assert "kv_differs" in [cause["code"] for cause in ran.data["diagnosis"]]
        assert ran.data["hit_rate"]["eligible_rate"] == 1.0

    def _is_shared(self, engines: Engines, prompt: str) -> bool:
        reference = engines.ask("producer-0", prompt)
        answer, hits = engines.ask_counting("consumer-0", prompt)
        assert_same(reference, answer)
        return hits == len(prompt) // CHUNK * CHUNK

    def test_engines_die_without_the_fixes(self, small: Engines) -> None:
        """Without B8 a stall deafens a producer's LMCache; without B4g preemptions end a consumer.

        B13 is off as well: its reads do not wait on the event loop either. Without B4g the slots of
        a resumed request name blocks twice: the CPU mover refuses that, GPUs' would store it. B21,
        which drops a store that is refused, is off to show it.
        """
        small.start_otherwise(
            {
                "producer-0": all_of(in_environ({"PDKIT_DISABLE_FIXES": "B8,B13"}), patient),
                "consumer-0": in_environ({"PDKIT_DISABLE_FIXES": "B4g,B21"}),
            }
        )
        stall(small, "deafened", "before retrying")
        small.store().flushall()
        small.ask("producer-0", text(600, "after the deafening stall"))
        assert small.store().dbsize() == 0, "what the producer computes still reaches Redis"
        refused, _ = crowd(small, "trampled", whom="consumer-0")
        assert refused
        assert small.dies("consumer-0")


def patient(service: Service) -> Service:
    """Have LMCache's client wait for Redis for longer than its five seconds."""
    (file,) = service.files
    config = yaml.safe_load(file.text)
    config["remote_url"] += "?socket_timeout=600"
    return replace(service, files=(replace(file, text=yaml.safe_dump(config)),))


def crowd(engines: Engines, seed: str, *, whom: str = "front") -> tuple[list[str], int]:
    """Ask for more KV than fits at once.

    Returns refused or wrong answers, wrong beside those to the same prompts alone, and how many
    preemptions there were.
    """
    # Four fit, and no longer once they have grown: each engine's steps are what this costs.
    prompts = [text(650, (seed, number)) for number in range(6)]
    before = engines.metric("consumer-0", "vllm:num_preemptions_total")
    try:
        # Of requests of their own, a slow producer would hand over one after the other.
        answers = engines.ask_together(whom, prompts, 200, within_s=180)
    except httpx.HTTPError as exc:
        return [str(exc)], 0
    preempted = engines.metric("consumer-0", "vllm:num_preemptions_total") - before
    found = [
        compare(engines.recomputed(prompt, 200), answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return [str(one) for one in found if not one.matches], preempted


def stall(engines: Engines, seed: str, sign: str) -> list[bool]:
    """Fill a producer's staging memory while Redis takes no writes, and have it load.

    Redis takes them again once the load has found no memory, of which `sign` in the log tells.
    Returns who was answered: a prompt of six chunks, and one that is to be loaded.
    """
    store = engines.store()
    store.flushall()
    engines.forget()
    known = text(600, (seed, "known"))
    engines.ask("producer-0", known)
    engines.forget()

    def answered(prompt: str) -> bool:
        try:
            return bool(engines.ask("producer-0", prompt, 4).tokens)
        except ApiError:
            return False

    def signs() -> int:
        return engines.kit.log(engines.name, "producer-0").count(sign)

    with ThreadPoolExecutor(2) as pool, writes_held(store):
        asked = [pool.submit(answered, text(3 * BATCH + 10, seed))]
        assert eventually(lambda: len(held(store)) == 3 * BATCH // CHUNK)
        before = signs()
        asked.append(pool.submit(answered, known))
        assert eventually(lambda: signs() > before)
    return [one.result() for one in asked]


NEVER_TAKES = '''
"""B99: a fix whose target the next release has moved."""

from pdkit_connector.registry import Fix, Need, ProbeResult

FIX = Fix(
    id="B99",
    title="a bug that is still there",
    link="https://github.com/LMCache/LMCache/issues/99999",
    reason="It would give wrong KV.",
    probe=lambda setting: ProbeResult(Need.NEEDED, "the bug shows"),
    apply=lambda setting: "patched something else",
)
'''


@pytest.fixture
def never_takes(tmp_path: Path) -> Deploy:
    """The kit with one more fix, whose target is not there."""
    root = Path(package.__file__).parents[1]
    for folder in ("deploy", "compose", "images", "lmcache_configs", "scripts"):
        shutil.copytree(root / folder, tmp_path / folder)
    fixes = tmp_path / "deploy" / "connector" / "pdkit_connector" / "fixes"
    (fixes / "b99_never_takes.py").write_text(NEVER_TAKES)
    return Deploy(tmp_path, {"PYTHONPATH": str(tmp_path)}, (sys.executable, "-m", "deploy"))


def test_a_fix_that_does_not_take_refuses_the_stack(never_takes: Deploy) -> None:
    """Before anything starts, saying which bug, where it is told, and the way out."""
    port = free_row()
    ran = never_takes.run("up", "--name", "refused", "--port", str(port))
    assert ran.code == 3, ran
    for part in ("fix B99", "issues/99999", 'PDKIT_DISABLE_FIXES: "B99"', "trying the connector's"):
        assert part in ran.stderr, ran
    assert ran.stderr.count("trying the connector's") == 1
    assert "started" not in ran.stderr
    never_takes.assert_nothing_left("refused", port)
    assert not (never_takes.home / "stacks" / "refused").exists(), "not even a log"


def test_a_fix_that_does_not_take_stops_an_engine_started_by_hand(never_takes: Deploy) -> None:
    """As the rendered files start it: before any of vLLM's cores, with the same words."""
    kit = never_takes.home / "deploy" / "connector"
    ran = subprocess.run(
        (sys.executable, "-m", "pdkit_connector.serve", "--kv-transfer-config", "{}"),
        env={**os.environ, "PYTHONPATH": str(kit)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = ran.stdout + ran.stderr
    assert ran.returncode == 3, told
    for part in ("B99", "issues/99999", "PDKIT_DISABLE_FIXES=B99"):
        assert part in told
    assert "EngineCore" not in told
