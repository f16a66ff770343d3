"""Engines that outlived their Redis are asked until they have found the new one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deploy.errors import StackUnhealthy
from deploy.planning.memory import ANSWER_TOKENS
from deploy.runtime.engine_api import ApiError, EngineApi
from deploy.workflows.check import renew_store_connections, run
from deploy.workflows.running import RunningStack, require_stack, store_of
from tests.unit.workflows.conftest import SMALL, Lab

CHUNK = SMALL["lmcache"]["chunk_size"]


@pytest.fixture
def running(served: Lab) -> RunningStack:
    return require_stack(served.home, "pdkit")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the prompts that any engine completes."""
    lengths: list[int] = []
    real = EngineApi.complete

    def complete(self: EngineApi, model: str, prompt: list[int], **options: object) -> object:
        lengths.append(len(prompt))
        return real(self, model, prompt, **options)

    monkeypatch.setattr(EngineApi, "complete", complete)
    return lengths


def test_each_is_asked_until_all_find_what_was_stored(
    served: Lab, running: RunningStack, asked: list[int]
) -> None:
    renew_store_connections(served.home, running)
    assert len(asked) == 3, "once is enough where all is well"
    with store_of(running) as store:
        assert store.stats().keys == 0, "and nothing of it stays"


def test_those_that_never_find_it_end_it(
    served: Lab, running: RunningStack, asked: list[int], with_faults: Callable[..., None]
) -> None:
    with_faults("producer:stores-nothing")
    renew_store_connections(served.home, running)
    assert len(asked) == 3 * run._RENEWALS


@pytest.mark.parametrize("more", [0, ANSWER_TOKENS - 1, ANSWER_TOKENS])
def test_a_context_without_room_for_a_chunk_and_an_answer(
    served: Lab,
    running: RunningStack,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    more: int,
) -> None:
    monkeypatch.setattr(EngineApi, "max_model_len", lambda _: CHUNK + more)
    renew_store_connections(served.home, running)
    assert asked == ([CHUNK] * 3 if more == ANSWER_TOKENS else [])


def test_an_engine_that_does_not_answer(
    served: Lab, running: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: EngineApi) -> int:
        raise ApiError(0, "no answer from producer-0")

    monkeypatch.setattr(EngineApi, "max_model_len", refuse)
    with pytest.raises(StackUnhealthy, match="no answer from producer-0") as caught:
        renew_store_connections(served.home, running)
    assert caught.value.hint == "deploy up --resume --name pdkit"
