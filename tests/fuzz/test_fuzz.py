"""A short run of every fuzzer, the same each time."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import front
from tests.fuzz.front import ClientLimits, Doorkeeper
from tests.fuzz.fuzzers import FUZZERS

ROUNDS = 2000


@pytest.mark.parametrize("name", FUZZERS)
def test_nothing_unexpected(name: str) -> None:
    seen = FUZZERS[name](random.Random(name), ROUNDS)
    assert len(seen) > 1, f"{seen}: a fuzzer must meet both sides"


@pytest.mark.parametrize("broken", ["_has_key", "_check_origin"])
def test_a_door_that_lets_all_in_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doorkeeper, broken, lambda *_: True)
    with pytest.raises(AssertionError):
        FUZZERS["clients' requests"](random.Random(0), ROUNDS)


def test_a_body_beyond_the_limit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "ClientLimits", lambda **_: ClientLimits())
    with pytest.raises(AssertionError):
        FUZZERS["clients' requests"](random.Random(0), ROUNDS)
