"""`swap` and `rollback`: another engine image or none of it, and no image reads another's KV."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import Ran
from tests.e2e.docker.conftest import (
    BROKEN,
    ENGINES,
    MODEL,
    SECOND,
    SERVICES,
    UNTESTED,
    Project,
    complete,
    failed,
)

PROMPT_TOKENS = 600  # two whole chunks of 256, and some
CHUNKS_TOKENS = 512
# Names every key with the seconds since somebody read or wrote it, and does neither itself.
IDLE = (
    "local found = {} for _, key in ipairs(redis.call('KEYS', '*')) do "
    "found[#found + 1] = key .. ' ' .. redis.call('OBJECT', 'IDLETIME', key) end return found"
)


def idle_s(stack: Project) -> dict[str, int]:
    """Return key of Redis → seconds since its last use."""
    rows = (line.rpartition(" ") for line in stack.redis("EVAL", IDLE, "0"))
    return {key: int(seconds) for key, _, seconds in rows if key}


def seeds(stack: Project) -> set[str]:
    """Return the hash seeds of the engines' containers: the names of their KV's name spaces."""
    found = stack.containers()
    variables = [text for engine in ENGINES for text in found[engine]["Config"]["Env"]]
    return {text for text in variables if text.startswith("PYTHONHASHSEED=")}


def external_hits(stack: Project, prompt: list[int]) -> int:
    """Send a prompt to the consumer and return how many of its tokens came from Redis."""
    with stack.api("consumer-0") as engine:
        before = engine.cache_counters()
        engine.complete(MODEL, prompt, max_tokens=1)
        return engine.cache_counters().since(before).external_hits


@dataclass(frozen=True)
class Seen:
    """A stack at one moment.

    Attributes:
        ran: the command that brought it there.
        hits: of the fixed prompt on the consumer, right after that.
    """

    ran: Ran | None
    seconds: float
    ids: dict[str, str]
    seeds: set[str]
    idle_s: dict[str, int]
    hits: int
    status: Any


def look(stack: Project, prompt: list[int], ran: Ran | None = None) -> Seen:
    return Seen(
        ran=ran,
        seconds=ran.seconds if ran else 0.0,
        ids=stack.ids(),
        seeds=seeds(stack),
        idle_s=idle_s(stack),
        hits=external_hits(stack, prompt),
        status=stack.ok("status"),
    )


@pytest.fixture(scope="module")
def prompt(stack: Project) -> list[int]:
    with stack.api("producer-0") as engine:
        return engine.tokenize(MODEL, f"At {time.time()}, " + "swallows cross the sea " * 300)[
            :PROMPT_TOKENS
        ]


@pytest.fixture(scope="module")
def first(stack: Project, prompt: list[int]) -> Seen:
    """The stack as it was started, with the prompt's KV in Redis."""
    before = idle_s(stack).keys()
    began = time.monotonic()
    with stack.api("producer-0") as producer:
        producer.complete(MODEL, prompt, max_tokens=1)
    seen = look(stack, prompt)
    # The answer waited for the stores. Redis counts in whole seconds, and is up to one behind.
    new = [seconds for key, seconds in seen.idle_s.items() if key not in before]
    assert len(new) == 2 and max(new) <= time.monotonic() - began + 1
    return seen


@pytest.fixture(scope="module")
def second(stack: Project, prompt: list[int], first: Seen) -> Seen:
    """The stack after a swap to the second image."""
    return look(stack, prompt, stack.run("swap", "--image", SECOND, "--json"))


@pytest.fixture(scope="module")
def back(stack: Project, prompt: list[int], second: Seen) -> Seen:
    """The stack after the swap again, which changes nothing, and a rollback."""
    again = stack.run("swap", "--image", SECOND, "--json")
    assert again.code == 0 and again.data["check"] is None, again
    assert again.data["down_s"] == 0 and set(again.data["kept"]) == set(SERVICES)
    assert stack.ids() == second.ids
    return look(stack, prompt, stack.run("rollback", "--json"))


@pytest.fixture(scope="module")
def after(stack: Project, prompt: list[int], back: Seen) -> Seen:
    """The stack after a swap to an image that does not serve."""
    assert back.status["healthy"]
    return look(stack, prompt, stack.run("swap", "--image", BROKEN, "--json"))


@pytest.mark.quick
class TestSwap:
    def test_a_swap_passes_its_check(self, second: Seen, catalogue: dict[str, Any]) -> None:
        assert second.ran and second.ran.code == 0, second.ran
        data = second.ran.data
        assert data["before"] == ["cpu", catalogue["cpu"]["image"]]
        assert data["after"] == ["cpu", SECOND]
        assert data["check"]["passed"] and data["check"]["hit_rate"]["eligible_rate"] == 1.0
        assert data["check"]["equivalence"]["mismatched"] == 0
        assert 0 < data["down_s"] <= data["seconds"]
        assert second.status["image"] == SECOND and second.status["healthy"]

    def test_a_swap_keeps_redis_and_router(self, first: Seen, second: Seen) -> None:
        assert second.ran and "redis" in second.ran.data["kept"]
        assert second.ids["redis"] == first.ids["redis"]
        assert all(second.ids[engine] != first.ids[engine] for engine in ENGINES)

    def test_a_swap_never_reads_kv_of_the_other_image(self, first: Seen, second: Seen) -> None:
        assert first.hits == CHUNKS_TOKENS
        assert len(first.seeds) == len(second.seeds) == 1 and first.seeds != second.seeds
        assert second.hits == 0
        # All of the old keys are still there, and nobody has asked for one since before the swap.
        assert first.idle_s.keys() <= second.idle_s.keys()
        assert all(second.idle_s[key] >= int(second.seconds) - 2 for key in first.idle_s)


@pytest.mark.quick
class TestRollback:
    def test_a_rollback_returns_to_the_first_image(
        self, first: Seen, back: Seen, catalogue: dict[str, Any]
    ) -> None:
        assert back.ran and back.ran.code == 0, back.ran
        assert back.ran.data["after"] == ["cpu", catalogue["cpu"]["image"]]
        assert back.ran.data["check"]["hit_rate"]["eligible_rate"] == 1.0
        assert back.ids["redis"] == first.ids["redis"]

    def test_a_rollback_finds_its_kv_again(self, first: Seen, back: Seen) -> None:
        assert back.seeds == first.seeds
        assert back.hits == first.hits == CHUNKS_TOKENS

    def test_a_rollback_is_in_the_history(self, back: Seen, catalogue: dict[str, Any]) -> None:
        image = catalogue["cpu"]["image"]
        newest = back.status["history"][:3]
        assert [(past["action"], past["outcome"], past["image"]) for past in newest] == [
            ("rollback", "good", image),
            ("swap", "good", SECOND),
            ("up", "good", image),
        ]


class TestImageThatDoesNotServe:
    def test_the_error_names_the_cause(self, after: Seen) -> None:
        assert after.ran
        error = failed(after.ran, code=4, name="swap_failed")
        assert BROKEN in error["message"] and "ImportError" in error["message"]
        assert "serves again" in error["message"]

    def test_the_previous_stack_serves_again(
        self, stack: Project, back: Seen, after: Seen, catalogue: dict[str, Any]
    ) -> None:
        assert after.status["healthy"] and after.status["image"] == catalogue["cpu"]["image"]
        assert after.ids["redis"] == back.ids["redis"]
        assert after.seeds == back.seeds and after.hits == CHUNKS_TOKENS
        assert stack.ok("check", "--quick")["hit_rate"]["eligible_rate"] == 1.0
        assert complete(stack.url("router"), "still there?")
        assert "already up" in stack.run("up").stderr

    def test_the_history_says_so(self, after: Seen) -> None:
        tried, now, *_ = after.status["history"]
        assert (now["action"], now["outcome"]) == ("rollback", "good")
        assert (tried["action"], tried["outcome"], tried["image"]) == ("swap", "failed", BROKEN)
        assert "ImportError" in tried["reason"]


@pytest.mark.quick
class TestRefused:
    """What is refused before anything is stopped: the containers run on as they were."""

    @pytest.fixture(autouse=True)
    def untouched(self, stack: Project) -> Iterator[None]:
        def runs() -> dict[str, tuple[str, str]]:
            found = stack.containers()
            return {name: (one["Id"], one["State"]["StartedAt"]) for name, one in found.items()}

        before = runs()
        yield
        assert runs() == before

    def test_untested_versions_are_refused(self, stack: Project) -> None:
        ran = stack.run("swap", "--image", UNTESTED, "--json")
        error = failed(ran, code=2, name="config")
        assert "vLLM 0.99 with LMCache 0.1" in error["message"]
        assert "vLLM 0.32.0 with LMCache 0.5.6" in error["message"]
        assert "--allow-untested" in error["hint"]

    def test_an_image_that_does_not_exist_is_refused(self, stack: Project) -> None:
        ran = stack.run("swap", "--image", "pdkit-e2e/nosuch:1", "--json")
        assert "pdkit-e2e/nosuch:1" in failed(ran, code=3, name="missing_image")["message"]

    def test_an_invalid_image_is_refused(self, stack: Project) -> None:
        error = failed(stack.run("swap", "--image", "cpv", "--json"), code=2, name="config")
        assert "'cpv'" in error["message"] and "did you mean 'cpu'?" in error["message"]

    def test_a_vendor_that_this_machine_lacks_is_refused(self, stack: Project) -> None:
        ran = stack.run("swap", "cuda", "--json")
        assert ran.code == 3, ran
        error = ran.envelope["errors"][0]
        assert error["code"] in ("missing_gpus", "missing_image"), error
        assert "cuda" in error["message"].lower()

    def test_an_image_of_another_vendor_is_refused(self, stack: Project) -> None:
        error = failed(stack.run("swap", "--image", "rocm", "--json"), code=2, name="config")
        assert "rocm" in error["message"] and "cpu" in error["message"]

    def test_a_swap_without_a_target_is_refused(self, stack: Project) -> None:
        failed(stack.run("swap", "--json"), code=2, name="usage")
        assert stack.ok("status")["healthy"]
