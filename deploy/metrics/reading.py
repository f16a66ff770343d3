"""A look at a whole stack, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from deploy.metrics.page import MetricsPage
from deploy.metrics.store_stats import StoreStats

ServiceCondition = Literal["ready", "not ready", "exited", "not started"]


@dataclass(frozen=True)
class Complaint:
    """A warning or an error in a service's log.

    Attributes:
        source: where in the service's code it comes from, or "".
        count: how many lines of one look said so.
    """

    service: str
    level: Literal["warning", "error"]
    text: str
    source: str = ""
    count: int = 1


@dataclass(frozen=True)
class ServiceReading:
    """One service at a moment.

    Attributes:
        life: the number of its process, or when its container began; 0 if it does not run, and
            another one once it has been restarted.
        page: its metrics; None if it has none, or did not answer.
        clock_s: when the page was read, by a clock that is never set.
        remote: another host has it.
    """

    name: str
    role: str
    condition: ServiceCondition
    life: int | str = 0
    page: MetricsPage | None = None
    clock_s: float = 0.0
    remote: bool = False


@dataclass(frozen=True)
class StackReading:
    """All of a stack at a moment.

    Attributes:
        clock_s: when it was begun, and when Redis was asked, by a clock that is never set.
        trouble: why nothing else could be read this time; "" if it could.
        what: the stack in a line.
        shares_kv: the engines share KV, so that there is a Redis.
        store: None if Redis does not answer.
        complaints: in the logs since the reading before; the oldest first.
    """

    name: str
    at: datetime
    clock_s: float
    up: bool = False
    trouble: str = ""
    what: str = ""
    user_redis: bool = False
    shares_kv: bool = True
    services: Mapping[str, ServiceReading] = field(default_factory=dict)
    store: StoreStats | None = None
    complaints: tuple[Complaint, ...] = ()
