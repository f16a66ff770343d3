"""The fixes at work in real engines: what ends or misleads an engine without them does not with.

A stack as older ones were: LMCache's own client on one plain Redis. It has a KV space that its
requests overflow, room for six chunks on their way to Redis, and saves what consumers decode. The
last test of its class turns fixes off and shows what they are for; it leaves the engines dead.
"""

from __future__ import annotations

import os
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
    VLLM_DEV_API,
    Engines,
    all_of,
    assert_same,
    in_environ,
)
from tests.e2e.store_vandals import behind_each_store, spoil
from tests.e2e.traffic import text
from tests.ports import free_row

BATCH = 512  # tokens a step: longer prompts are prefilled in pieces


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
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("small")
    spec = {
        "save_decode_cache": True,
        "redis": {"client": "lmcache"},
        "lmcache": {"staging_gib": 3 / 1024},  # six chunks
        "engine": {
            "dtype": "bfloat16",
            "kv_cache_gib": 0.0055,  # 2883 tokens
            "max_model_len": 2560,
            "args": ["--max-num-batched-tokens", str(BATCH)],
            "env": VLLM_DEV_API,
        },
    }
    (folder / "stack.yaml").write_text(yaml.safe_dump(spec))
    kit, port = Deploy(folder), free_row()
    with running_stack(kit, "small", port, "-f", str(folder / "stack.yaml"), "--no-check"):
        yield Engines(kit, "small", port)


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

        Without B4g the slots of a resumed request name blocks twice: the CPU mover refuses that,
        GPUs' would store it. B21, which drops a store that is refused, is off to show it.
        """
        small.start_otherwise(
            {
                "producer-0": all_of(in_environ({"PDKIT_DISABLE_FIXES": "B8"}), patient),
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
