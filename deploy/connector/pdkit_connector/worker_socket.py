"""A socket by which an engine's API server asks its workers, which are processes of their own.

Any user of the machine can connect to an abstract socket, or take its name first, so both sides ask
the kernel who the other is, and talk only to their own user.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping

from pdkit_connector.log import get_logger

# The engine's name, unlike any other's on this machine; without it there is no socket.
NAME_ENV = "PDKIT_ENGINE_SOCKET"
WORKERS_ENV = "PDKIT_ENGINE_WORKERS"

_LISTEN_S = 5.0
_QUESTION_S = 5.0
_CONNECT_S = 2.0
_QUESTION_BYTES = 64
_ANSWER_BYTES = 1 << 20

Answer = Callable[[], Awaitable[bytes]]

_served: set[tuple[str, int]] = set()


def engine_name() -> str | None:
    """Return the engine's name, None where the kit asked for no socket."""
    return os.environ.get(NAME_ENV) or None


def make_unguessable() -> None:
    """Add a part that others cannot guess to the engine's name, for this process and children."""
    if name := engine_name():
        os.environ[NAME_ENV] = f"{name}-{secrets.token_hex(8)}"


def workers() -> int:
    """Count the engine's workers."""
    return int(os.environ.get(WORKERS_ENV) or 1)


def address(name: str, worker: int) -> str:
    """Return a worker's socket, of Linux's abstract kind: it is gone with its process."""
    return f"\0pdkit-engine/{os.getuid()}/{name}/{worker}"


def serve(name: str, worker: int, answers: Mapping[str, Answer]) -> None:
    """Answer questions by their name until the process ends; returns once it listens.

    What is served already goes on being served.
    """
    if (name, worker) in _served:
        return
    _served.add((name, worker))
    listening = threading.Event()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not _is_same_user(writer.get_extra_info("socket")):
                return
            line = await asyncio.wait_for(reader.readuntil(b"\n"), _QUESTION_S)
            question = line[:_QUESTION_BYTES].decode().strip()
            if question in answers:
                writer.write(await answers[question]())
            await writer.drain()
        except (
            ConnectionError,
            UnicodeDecodeError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            asyncio.TimeoutError,
        ):
            pass  # the client went away, or asks an unknown question
        finally:
            writer.close()

    async def run() -> None:
        try:
            server = await asyncio.start_unix_server(reply, sock=_listening(name, worker))
        except OSError as exc:
            get_logger().error("pdkit-connector ERROR no socket for the API server: %s", exc)
            listening.set()
            return
        listening.set()
        async with server:
            await server.serve_forever()

    threading.Thread(
        target=lambda: asyncio.run(run()), name="pdkit-worker-socket", daemon=True
    ).start()
    listening.wait(_LISTEN_S)


def _listening(name: str, worker: int) -> socket.socket:
    """Return a socket that listens, made here: uvloop knows no abstract addresses."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(address(name, worker))
    listening.listen(1024)
    listening.setblocking(False)
    return listening


def _peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end, as the kernel noted it when that listened."""
    ucred = struct.Struct("3i")  # pid, uid, gid
    _, uid, _ = ucred.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size)
    )
    return int(uid)


def _is_same_user(connection: socket.socket) -> bool:
    return _peer_uid(connection) == os.getuid()


def _connect(asking: socket.socket, name: str, worker: int) -> None:
    """Connect to a worker, which takes it or refuses it at once.

    Raises:
        OSError: no worker listens, or another user does (PermissionError).
    """
    asking.connect(address(name, worker))
    if not _is_same_user(asking):
        raise PermissionError(f"user {_peer_uid(asking)} listens in place of the engine's worker")


def _connected(name: str, worker: int) -> socket.socket:
    """Return a connection that does not block."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        asking.setblocking(False)
        _connect(asking, name, worker)
    except OSError:
        asking.close()
        raise
    return asking


async def ask(name: str, worker: int, question: str, limit_s: float) -> bytes | None:
    """Return a worker's answer; None where it gives none within the limit."""

    async def exchange() -> bytes:
        reader, writer = await asyncio.open_unix_connection(sock=_connected(name, worker))
        try:
            writer.write(question.encode() + b"\n")
            return await reader.read(_ANSWER_BYTES)
        finally:
            writer.close()

    try:
        return await asyncio.wait_for(exchange(), limit_s) or None
    except (OSError, asyncio.TimeoutError):
        return None


def ask_now(name: str, worker: int, question: str, limit_s: float) -> bytes | None:
    """Do what `ask` does, and block; the limit is for each step.

    Returns:
        The answer, empty where the worker does not know the question; None if it is silent.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(limit_s)
            _connect(asking, name, worker)
            asking.sendall(question.encode() + b"\n")
            answer = b""
            while piece := asking.recv(_ANSWER_BYTES):
                answer += piece
    except OSError:
        return None
    return answer
