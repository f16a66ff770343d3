"""Signals come through once, and never inside a step that must be whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from deploy.runtime.interrupts import cleaning_up, interrupt_once, uninterrupted

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    interrupt_once()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_signal_interrupts(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_only_the_first_signal_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    for number in NUMBERS:
        os.kill(os.getpid(), number)


def test_a_step_is_finished_first() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted(), uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("recorded")
        done.append("next step")
    assert done == ["recorded"]


def test_a_step_that_fails_meanwhile_does_not_lose_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("disk")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_step_that_fails_says_so_itself() -> None:
    with pytest.raises(ValueError, match="disk"), uninterrupted():
        raise ValueError("disk")


def test_clean_up_is_not_interrupted() -> None:
    with cleaning_up():
        for number in NUMBERS:
            os.kill(os.getpid(), number)
