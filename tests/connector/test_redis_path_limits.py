"""The time limits of a connection's calls: the kernel keeps them, and is told seldom."""

from __future__ import annotations

import socket
import struct
from types import SimpleNamespace

import pytest
from pdkit_connector.redis_path.protocol import Deadline, Link


class Told(socket.socket):
    """A socket that notes the limits that the kernel is told for reads, in seconds."""

    def setsockopt(self, level, option, value):
        if option == socket.SO_RCVTIMEO:
            seconds, micros = struct.unpack("@ll", value)
            self.__dict__.setdefault("limits", []).append(seconds + micros / 1e6)
        super().setsockopt(level, option, value)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    told = Told(fileno=ours.detach())
    yield told, theirs
    told.close()
    theirs.close()


@pytest.fixture
def ask(ends):
    told, theirs = ends
    link = Link(SimpleNamespace(_sock=told))

    def asked(deadline):
        link.send([b"PING"], deadline)
        theirs.sendall(b"+PONG\r\n")
        assert link.line(deadline) == b"+PONG"
        return told.limits

    return asked


def test_the_next_question_with_as_much_time_costs_no_call(ask):
    assert len(ask(Deadline(1000, silent_s=5))) == 1
    assert len(ask(Deadline(900, silent_s=5))) == 1


@pytest.mark.parametrize("seconds", [900, 1100])
def test_a_question_with_less_or_more_time_gets_its_own_limit(ask, seconds):
    ask(Deadline(1000))
    first, second = ask(Deadline(seconds))
    assert first == pytest.approx(1000, abs=60)
    assert second == pytest.approx(seconds, abs=60)


def test_a_server_may_be_silent_for_as_long_as_that(ask):
    ask(Deadline(1000))
    assert ask(Deadline(1000, silent_s=5))[1:] == [pytest.approx(5)]


def test_a_question_with_little_time_ends_in_it(ends):
    told, _silent = ends
    link = Link(SimpleNamespace(_sock=told))
    link.send([b"PING"], Deadline(1000))
    with pytest.raises(TimeoutError):
        link.line(Deadline(0.05))
