"""Connections to Redis that a hostile or broken server cannot fill or hold up.

redis-py reads as many bytes as a server announces, and its timeout starts again with every byte.
Here, each answer is limited in size and in total time. Engines have such limits in the connector,
which the kit does not import.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from deploy.runtime.measured_socket import MeasuredSocket

# Limit of each step: connecting, TLS, one read.
STEP_S = 2.0
# Limits of one answer; a page of keys has about 100 KiB.
ANSWER_S = 6.0
ANSWER_BYTES = 4 << 20


def measured(plain_or_tls: Any) -> MeasuredSocket:
    """Return a socket to Redis with these limits."""
    return MeasuredSocket(plain_or_tls, answer_s=ANSWER_S, answer_bytes=ANSWER_BYTES)


@cache
def bounded(connection_class: type) -> type:
    """Return the class of redis-py's connections with these limits."""

    class Bounded(connection_class):  # type: ignore[misc]
        def _connect(self) -> Any:
            return measured(super()._connect())

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if self._sock is not None:
                self._sock.restart()
            super().send_packed_command(command, check_health=check_health)

    return Bounded
