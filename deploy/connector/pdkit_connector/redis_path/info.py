"""What engines report about Redis on their metrics page: memory, evictions, traffic.

Whoever asks gets the last reading at once, and has the next one made: a Redis that hangs holds up
no page.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pdkit_connector.redis_path.pool import Dropping, Shards
from pdkit_connector.redis_path.protocol import Deadline, LinkBroken, ReplyError, command

QUESTION = "servers"
PREFIX = "pdkit_redis_"
UP = "up"
# Field of INFO → name and meaning of a metric.
GAUGES: Mapping[str, tuple[str, str]] = {
    "used_memory": ("used_memory_bytes", "Memory that Redis has in use."),
    "maxmemory": ("max_memory_bytes", "Memory that Redis may use; 0 without a limit."),
    "connected_clients": ("clients", "Clients that are connected to Redis."),
}
COUNTERS: Mapping[str, tuple[str, str]] = {
    "evicted_keys": ("evicted_keys", "Keys that Redis evicted."),
    "total_commands_processed": ("commands", "Commands that Redis processed."),
    "total_net_input_bytes": ("received_bytes", "Bytes that Redis received."),
    "total_net_output_bytes": ("sent_bytes", "Bytes that Redis sent."),
}
_LIMIT_S = 2.0
_FRESH_S = 1.0
_INFO_BYTES = 1 << 16
_NUMBER = re.compile(r"[0-9]{1,20}")

ServerNumbers = Mapping[str, int]


class Servers:
    """The Redis servers of an engine's worker, one a shard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shards: Shards | None = None
        self._readings: dict[int, ServerNumbers] = {}
        self._begun_at = -_FRESH_S
        self._busy = False

    def watch(self, shards: Shards) -> None:
        """Report on these from now on."""
        self._shards, self._readings = shards, {}

    def dump(self) -> bytes:
        """Return the last readings as JSON, and have new ones made."""
        with self._lock:
            old = time.monotonic() - self._begun_at >= _FRESH_S
            if self._shards is not None and old and not self._busy:
                self._busy, self._begun_at = True, time.monotonic()
                threading.Thread(target=self._read, name="pdkit-redis-info", daemon=True).start()
            return json.dumps(self._readings).encode()

    def _read(self) -> None:
        try:
            shards = enumerate(self._shards or ())
            self._readings = {number: _reading(shard.watching) for number, shard in shards}
        finally:
            self._busy = False


def _reading(links: Any) -> ServerNumbers:
    """Read one server's report; UP alone where it answers no more than that."""
    deadline = Deadline(_LIMIT_S)
    try:
        node = links.route(deadline)(b"")
        with Dropping(links, node):
            link = links.to(node, deadline)
            link.send([command(b"INFO")], deadline)
            length = link.length(deadline) or 0
            if length > _INFO_BYTES:
                raise LinkBroken(f"an INFO of {length} bytes")
            text = link.read(length, deadline).decode("utf-8", "replace")
            link.end_of_string(deadline)
    except ReplyError:
        return {UP: 1}  # this user may not see it
    except Exception:  # noqa: BLE001 - redis-py's own kinds, OSError, a lying server
        return {UP: 0}
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    known = {name: fields[name] for name in (*GAUGES, *COUNTERS) if name in fields}
    return {
        UP: 1,
        **{name: int(value) for name, value in known.items() if _NUMBER.fullmatch(value)},
    }


# What this process reports on; an engine's worker has one way to Redis.
SERVERS = Servers()


async def answer() -> bytes:
    """Return a worker's answer to QUESTION."""
    return SERVERS.dump()


def families(dump: bytes) -> Iterator[Any]:
    """Yield the readings of a worker as Prometheus' metrics."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    readings: Mapping[str, ServerNumbers] = json.loads(dump)
    kinds = (
        (GaugeMetricFamily, {UP: (UP, "1 if Redis answers this engine."), **GAUGES}),
        (CounterMetricFamily, COUNTERS),
    )
    for kind, metrics in kinds:
        for field, (name, help_text) in metrics.items():
            family = kind(PREFIX + name, help_text, labels=["shard"])
            for shard, reading in readings.items():
                if field in reading:
                    family.add_metric([shard], reading[field])
            if family.samples:
                yield family
