"""The kit's own requests over HTTP: httpx, with limits that no server can exceed.

httpx waits as long for each piece of an answer as it may for all of it, and reads without a limit.
Here, each request has a connection of its own, which limits the answer in seconds and in bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpcore
import httpx

_CONNECT_S = 2.0
_PAGE_BYTES = 16 << 20  # an engine's metrics have some 100 KiB
_ANSWER_BYTES = 64 << 20  # the token ids of a long prompt take some MiB
_SOCKET_BYTES = 256 << 20  # Docker's, which has logs of up to 100 MiB
_UNIX = "unix://"


class Page(NamedTuple):
    """The answer to a GET."""

    status: int
    text: str


class _Connection(httpcore.NetworkStream):
    """A connection for one answer, which must come whole in the time that a read may take."""

    def __init__(self, inner: httpcore.NetworkStream, most_bytes: int) -> None:
        self._inner, self._most_bytes = inner, most_bytes
        self._began, self._left_bytes = time.monotonic(), most_bytes

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left_s = self._began + (timeout or 0) - time.monotonic()
        try:
            if left_s <= 0:
                raise httpcore.ReadTimeout("timed out")
            data = self._inner.read(max_bytes, left_s)
        except httpcore.ReadTimeout as exc:
            if self._left_bytes == self._most_bytes:
                raise
            raise httpcore.ReadTimeout(f"an answer that took longer than {timeout:g} s") from exc
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise httpcore.ReadError(f"an answer of more than {self._most_bytes >> 20} MiB")
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Network(httpcore.SyncBackend):
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def connect_tcp(self, *args: Any, **more: Any) -> httpcore.NetworkStream:
        return _Connection(super().connect_tcp(*args, **more), self._most_bytes)

    def connect_unix_socket(self, *args: Any, **more: Any) -> httpcore.NetworkStream:
        return _Connection(super().connect_unix_socket(*args, **more), self._most_bytes)


def get(url: str, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Page:
    """Read a page, as `ask` does."""
    status, body = ask("GET", url, path, timeout_s=timeout_s, headers=headers)
    return Page(status, body.decode("utf-8", "replace"))


def ask(
    method: str,
    url: str,
    path: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Send a request and return status and body of the answer.

    Args:
        url: `http://HOST:PORT`, or `unix:///PATH` of a socket. Proxies are ignored, redirects are
            not followed.

    Raises:
        TimeoutError: not all of an answer came within `timeout_s`.
        OSError: no answer, an incomplete one, or one that is too long.
    """
    socket = url.removeprefix(_UNIX) if url.startswith(_UNIX) else None
    most_bytes = _SOCKET_BYTES if socket else _PAGE_BYTES if method == "GET" else _ANSWER_BYTES
    # Reading certificates, which plain HTTP does not need, takes longer than a request.
    transport = httpx.HTTPTransport(verify=False)
    transport._pool = httpcore.ConnectionPool(
        uds=socket,
        network_backend=_Network(most_bytes),
    )
    client = httpx.Client(
        base_url="http://localhost" if socket else url,  # Docker refuses a path as the Host
        transport=transport,
        headers={"Accept-Encoding": "identity", **(headers or {})},
        timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
        trust_env=False,
    )
    try:
        with client, client.stream(method, path, content=body) as answer:
            return answer.status_code, b"".join(answer.iter_raw())
    except httpx.TimeoutException as exc:
        raise TimeoutError(str(exc) or "timed out") from exc
    # The last two: a name that no host can have.
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
        raise ConnectionError(str(exc) or type(exc).__name__) from exc
