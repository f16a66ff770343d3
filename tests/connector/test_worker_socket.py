"""No file mode protects the workers' socket: both sides look who the other is."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket

import pytest
from pdkit_connector import worker_socket
from pdkit_connector.worker_socket import address, ask, ask_now, serve

_names = (f"socket-{os.getpid()}-{number}" for number in itertools.count())
ASK = {
    "ask": lambda name: asyncio.run(ask(name, 0, "q", 2.0)),
    "ask_now": lambda name: ask_now(name, 0, "q", 2.0),
}


@pytest.fixture
def asked():
    """Return how often the worker was asked; its name is `name`."""
    return []


@pytest.fixture
def name(asked):
    name = next(_names)

    async def answer():
        asked.append(1)
        return b"stored"

    serve(name, 0, {"q": answer})
    return name


def another_user_at(monkeypatch, end, name):
    """Have the kernel say that another user is at the other end, where `end` has this name.

    A server of an earlier test may accept a connection only now: it is not meant.
    """
    real = worker_socket._peer_uid

    def peer(connection):
        return real(connection) + (getattr(connection, end)() == address(name, 0).encode())

    monkeypatch.setattr(worker_socket, "_peer_uid", peer)


@pytest.mark.parametrize("how", ASK)
def test_the_same_user_is_answered(name, how):
    assert ASK[how](name) == b"stored"


@pytest.mark.parametrize("how", ASK)
def test_the_answer_of_another_user_is_not_used(name, how, asked, monkeypatch):
    another_user_at(monkeypatch, "getpeername", name)
    assert ASK[how](name) is None
    assert asked == []


@pytest.mark.parametrize("how", ASK)
def test_another_user_who_asks_is_not_answered(name, how, asked, monkeypatch):
    another_user_at(monkeypatch, "getsockname", name)
    assert ASK[how](name) is None
    assert asked == []


def test_the_user_is_read_from_the_kernel():
    for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM):
        with one:
            assert worker_socket._peer_uid(one) == os.getuid()


def test_a_client_that_asks_nothing_is_disconnected(name, monkeypatch):
    monkeypatch.setattr(worker_socket, "_QUESTION_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.settimeout(30)
        silent.connect(address(name, 0))
        assert silent.recv(1) == b""


def test_nonsense_ends_only_its_own_connection(name):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(30)
        client.connect(address(name, 0))
        client.sendall(b"\xff\xfe\n")
        assert client.recv(1) == b""
    assert ask_now(name, 0, "q", 2.0) == b"stored"
