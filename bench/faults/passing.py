"""Faults that pass: a process that stands still for a while, a Redis that takes no more keys."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import sleep

from deploy.runtime.process import sessions
from deploy.runtime.redis_socket import RedisSocket
from deploy.stack.build import REDIS_PASSWORD
from deploy.stack.service import Service
from deploy.workflows.running import RunningStack

Fault = Callable[[RunningStack, Service], None]


def stand_still(running: RunningStack, service: Service, for_s: float = 10.0) -> None:
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


def take_no_keys(running: RunningStack, service: Service, for_s: float = 10.0) -> None:
    """Empty a Redis and have it refuse every write, as one that is full and may not evict."""
    with _redis(running, service) as redis:
        limit = redis.ask("CONFIG", "GET", "maxmemory")[1]
        policy = redis.ask("CONFIG", "GET", "maxmemory-policy")[1]
        redis.ask("FLUSHALL")
        redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1")
        try:
            sleep(for_s)
        finally:
            redis.ask("CONFIG", "SET", "maxmemory-policy", policy, "maxmemory", limit)


@contextmanager
def _redis(running: RunningStack, service: Service) -> Iterator[RedisSocket]:
    redis = RedisSocket(service.socket, running.secrets[REDIS_PASSWORD])
    try:
        yield redis
    finally:
        redis.close()


def faults_of(running: RunningStack) -> Mapping[str, tuple[Fault, Service]]:
    """Return what can be done to a stack, by its name."""
    found: dict[str, tuple[Fault, Service]] = {
        f"{service.name} stopped 10 s": (stand_still, service) for service in running.stack.services
    }
    return found | {
        f"{redis.name} full 10 s": (take_no_keys, redis) for redis in running.stack.redis
    }
