"""Ctrl-C, TERM and HUP: one interrupt, and never between a step and its record."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Gate:
    """Whether interrupts are held back, one has come, or one waits."""

    depth = 0
    waiting = False
    used = False


_gate = _Gate()


def interrupt_once() -> None:
    """Let the first signal raise KeyboardInterrupt; later ones do not disturb the clean-up."""
    _gate.depth, _gate.waiting, _gate.used = 0, False, False
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt until the end of the block."""
    _gate.depth += 1
    try:
        yield
    finally:
        _gate.depth -= 1
        if _gate.waiting and not _gate.depth:
            _gate.waiting = False
            _interrupt()


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Ignore interrupts from here on: something else already ends the command."""
    _gate.used = True
    yield


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    if _gate.used:
        return
    if _gate.depth:
        _gate.waiting = True
        return
    _interrupt()


def _interrupt() -> None:
    _gate.used = True
    raise KeyboardInterrupt
