"""What is done to a stack under load, by name."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any, Literal

from deploy.config.fields import IN_ENGINES, MP
from deploy.planning.engines import ENGINE_ROLES
from deploy.runtime.process import sessions
from deploy.runtime.redis_client import client_at
from deploy.stack.layout import REDIS_PASSWORD
from deploy.stack.service import Service
from deploy.workflows.running import RunningStack

FOR_S = 10.0
_BLOCK = bytes(2**20)

Kind = Literal["kill", "pass", "pair", "command"]
KINDS: tuple[Kind, ...] = ("kill", "pass", "pair", "command")


@dataclass(frozen=True)
class Fault:
    """Something that is done to a stack.

    Attributes:
        happen: does it, and returns when it is over.
        kills: services that have to come back by themselves.
        breaks_off: what the router answers meanwhile may break off.
    """

    name: str
    kind: Kind
    happen: Callable[[], None]
    kills: tuple[str, ...] = ()
    breaks_off: bool = False


def faults_of(
    running: RunningStack, command: Callable[..., object], disk: Path | None = None
) -> dict[str, Fault]:
    """Return what can be done to a stack as it runs now.

    Args:
        command: runs a command of the kit.
        disk: where the stack's logs and state are, if that is a file system of its own.
    """
    services = [one for one in running.stack.services if one not in running.stack.monitoring]
    found = [
        *(_kill(running, service) for service in services),
        *(_kill_core(running, one) for one in services if one.role in ENGINE_ROLES),
        *(_kill(running, *two) for two in itertools.combinations(services, 2)),
        *(_stop(running, service) for service in services),
        *(fault for redis in running.stack.redis for fault in _of_redis(running, redis)),
        *([_full_disk(disk)] if disk else []),
        *_commands(running, command),
    ]
    return {fault.name: fault for fault in found}


def _kill(running: RunningStack, *services: Service) -> Fault:
    names = tuple(service.name for service in services)

    def happen() -> None:
        for name in names:
            os.kill(running.state.services[name].pid, signal.SIGKILL)

    kind: Kind = "pair" if len(names) > 1 else "kill"
    return Fault(f"{' and '.join(names)} killed", kind, happen, names, "router" in names)


def _kill_core(running: RunningStack, engine: Service) -> Fault:
    """Kill what holds an engine's model and KV, as the kernel does first if memory ends."""

    def happen() -> None:
        record = running.state.services[engine.name]
        (core,) = (
            process
            for process in sessions.session_members(record.pid, record.start_time)
            if process.name().startswith("VLLM::EngineCor")  # the kernel keeps 15 characters
        )
        core.kill()

    return Fault(f"{engine.name}'s core killed", "kill", happen, (engine.name,))


def _stop(running: RunningStack, service: Service) -> Fault:
    return Fault(
        f"{service.name} stopped {FOR_S:g} s", "pass", lambda: stand_still(running, service)
    )


def _of_redis(running: RunningStack, redis: Service) -> Iterator[Fault]:
    for name, fault in (("emptied", empty), ("full", take_no_keys), ("cut off", cut_off)):
        lasts = "" if name == "emptied" else f" {FOR_S:g} s"
        yield Fault(
            f"{redis.name} {name}{lasts}", "pass", lambda fault=fault: fault(running, redis)
        )


def _full_disk(disk: Path) -> Fault:
    return Fault(f"disk full {FOR_S:g} s", "pass", lambda: fill(disk))


def _commands(running: RunningStack, command: Callable[..., object]) -> Iterator[Fault]:
    names = ("--name", running.stack.name)
    asked: list[Sequence[str]] = [
        ("restart", "router"),
        *(("restart", redis.name) for redis in running.stack.redis),
        ("up", "--resume", "--no-check"),
    ]
    if running.prepared.plan.consumers[1:]:
        asked.insert(0, ("restart",))  # of the only consumer it is refused
    # Processes have no image to swap: the connector is, which replaces the engines all the same.
    there = IN_ENGINES if running.prepared.plan.kv_server else MP
    back = running.prepared.plan.connector
    swaps = [("swap", "--connector", there), ("swap", "--connector", back)]

    def fault(name: str, commands: Sequence[Sequence[str]]) -> Fault:
        def happen() -> None:
            for one in commands:
                command(*one, *names)

        return Fault(name, "command", happen)

    yield from (fault(f"deploy {' '.join(one)}", [one]) for one in asked)
    yield fault("deploy swap, and back", swaps)


def stand_still(running: RunningStack, service: Service, for_s: float = FOR_S) -> None:
    """Stop a service and all its helpers by SIGSTOP, then let them go on."""
    record = running.state.services[service.name]
    members = sessions.session_members(record.pid, record.start_time)
    try:
        for process in members:
            os.kill(process.pid, signal.SIGSTOP)
        sleep(for_s)
    finally:
        for process in members:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)


def empty(running: RunningStack, service: Service) -> None:
    """Delete all keys, as a restart does that engines do not notice."""
    with _redis(running, service) as redis:
        redis.flushall()


def take_no_keys(running: RunningStack, service: Service, for_s: float = FOR_S) -> None:
    """Empty a Redis and have it refuse every write, as one that is full and may not evict."""
    with _redis(running, service) as redis:
        limit = redis.config_get("maxmemory")["maxmemory"]
        policy = redis.config_get("maxmemory-policy")["maxmemory-policy"]
        redis.flushall()
        redis.config_set("maxmemory-policy", "noeviction", "maxmemory", "1")
        try:
            sleep(for_s)
        finally:
            redis.config_set("maxmemory-policy", policy, "maxmemory", limit)


def cut_off(running: RunningStack, service: Service, for_s: float = FOR_S) -> None:
    """Close all connections of a Redis and refuse new ones, as a cut network does."""
    place = Path(service.socket)
    hidden = place.with_name(f"{place.name}.cut")
    with _redis(running, service) as redis:
        redis.ping()  # connects
        place.rename(hidden)
        try:
            redis.client_kill_filter(_type="normal", skipme=True)
            sleep(for_s)
        finally:
            hidden.rename(place)


def fill(folder: Path, for_s: float = FOR_S) -> None:
    """Leave no room on a folder's file system."""
    file = folder / "pdkit-fill"
    try:
        with file.open("wb", buffering=0) as stream:
            _write_all(stream.fileno())
        sleep(for_s)
    finally:
        file.unlink(missing_ok=True)


def _write_all(descriptor: int) -> None:
    try:
        while True:
            os.write(descriptor, _BLOCK)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise


def _redis(running: RunningStack, service: Service) -> AbstractContextManager[Any]:
    return closing(client_at(service.socket, running.secrets[REDIS_PASSWORD]))
