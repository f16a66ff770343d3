"""Whether the ports a stack needs are free."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from deploy.errors import MachineError, PortTaken


def require_free(
    ports: Mapping[int, str],
    *,
    base: int,
    host: str,
    others: Mapping[int, str] = MappingProxyType({}),
    setting: str = "bind",
) -> None:
    """Check that each port can be listened on; `ports` is port → whose it would be.

    `base` is the stack's `--port`, from which its other ports follow. `others` maps the ports of
    other stacks to their names: an engine that is still loading does not listen yet, and vLLM lets
    two engines listen on one port.

    Raises:
        PortTaken: one is taken; the hint names a `--port` with room for the whole stack.
        MachineError: `host`, which `setting` names, is no address of this machine.
    """
    _require_address(host, setting)
    taken = [port for port in sorted(ports) if port in others or not _is_free(port, host)]
    if not taken:
        return
    free = free_base([port - base for port in ports], base + 100, host)
    whose = f"the stack '{others[taken[0]]}'" if taken[0] in others else "another program"
    raise PortTaken(
        f"port {taken[0]} (for {ports[taken[0]]}) is taken by {whose}",
        retry=({"--port": str(free or "PORT")},),
        hint=f"ss -ltnp 'sport = :{taken[0]}', which shows who listens",
    )


def _require_address(host: str, setting: str) -> None:
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as exc:
        raise MachineError(
            f"'{host}' is not an address of this machine ({exc.strerror or exc})",
            setting=setting,
            hint=f"set {setting} to 127.0.0.1, 0.0.0.0 or an address that `ip address` lists",
        ) from exc


def free_base(offsets: Iterable[int], first: int, host: str) -> int | None:
    """Return the first port, in steps of 100, of which all these offsets are free."""
    wanted = sorted(offsets)
    for candidate in range(first, 65535 - wanted[-1], 100):
        if all(_is_free(candidate + offset, host) for offset in wanted):
            return candidate
    return None


def _is_free(port: int, host: str) -> bool:
    """Tell whether a server could listen; a port that was just closed counts as free."""
    for address in {host, "127.0.0.1"}:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
