"""What engines moved between themselves and Redis, as the connector's own Redis path counts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from operator import sub
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from deploy.document import with_fields_of

# Every name on an engine's metrics page that belongs here begins so.
PREFIX = "pdkit_store_"


class Sample(NamedTuple):
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class StorePath:
    """Counts of one engine, or of several together, since their start or since an earlier reading.

    Attributes:
        stored_s, loaded_s: seconds of work; several stores run side by side.
        stored_cpu_s, loaded_cpu_s: CPU time of the threads that move values.
        refused: chunks that were corrupt or foreign, and so were computed instead of loaded.
        left_out: chunks that were not stored, because Redis failed, refused or was too slow.
        not_loaded: chunks that were found but did not arrive in time, or were gone by then.
        replaced: chunks that another engine replaced while they were loaded, and that were read
            again and loaded: no damage.
        failures: failed calls to Redis, of any kind.
        waits: answers that waited for their KV to be stored.
        late: answers that were sent before their KV was stored.
    """

    stored_bytes: float = 0
    stored_s: float = 0
    stored_cpu_s: float = 0
    stored_chunks: float = 0
    left_out: float = 0
    loaded_bytes: float = 0
    loaded_s: float = 0
    loaded_cpu_s: float = 0
    loaded_chunks: float = 0
    refused: float = 0
    not_loaded: float = 0
    replaced: float = 0
    lookups: float = 0
    lookup_s: float = 0
    failures: float = 0
    waits: float = 0
    wait_s: float = 0
    late: float = 0

    @classmethod
    def read(cls, samples: Iterable[Sample]) -> StorePath | None:
        """Return the counts of a metrics page; None if the engine has no such path."""
        mine = [s for s in samples if s.name.startswith(PREFIX) and s.name.endswith("_total")]
        # An engine with LMCache's own client counts its barrier, too, and nothing else.
        if not any(s.name == f"{PREFIX}chunks_total" for s in mine):
            return None

        def total(name: str, **labels: str) -> float:
            full = f"{PREFIX}{name}_total"
            return sum(
                s.value for s in mine if s.name == full and labels.items() <= s.labels.items()
            )

        stored = total("chunks", operation="store", result="stored")
        loaded = total("chunks", operation="load", result="loaded")
        refused = sum(
            total("chunks", operation="load", result=result) for result in ("corrupt", "foreign")
        )
        return cls(
            stored_bytes=total("bytes", operation="store"),
            stored_s=total("seconds", operation="store"),
            stored_cpu_s=total("cpu_seconds", operation="store"),
            stored_chunks=stored,
            # All other results of a chunk; there may be more kinds one day.
            left_out=total("chunks", operation="store") - stored,
            loaded_bytes=total("bytes", operation="load"),
            loaded_s=total("seconds", operation="load"),
            loaded_cpu_s=total("cpu_seconds", operation="load"),
            loaded_chunks=loaded,
            refused=refused,
            not_loaded=total("chunks", operation="load") - loaded - refused,
            replaced=total("replaced"),
            lookups=total("calls", operation="lookup"),
            lookup_s=total("seconds", operation="lookup"),
            failures=total("failures"),
            waits=total("barrier_waits"),
            wait_s=total("barrier_seconds"),
            late=total("barrier_waits") - total("barrier_waits", result="stored"),
        )

    def since(self, earlier: StorePath) -> StorePath:
        """Return the difference from an earlier reading."""
        return StorePath(*map(sub, astuple(self), astuple(earlier)))

    @property
    def load_gb_s(self) -> float:
        """Payload loaded, in GB a second of loading."""
        return self.loaded_bytes / self.loaded_s / 1e9 if self.loaded_s else 0.0

    @property
    def store_gb_s(self) -> float:
        """Payload stored, in GB a second of one connection's storing."""
        return self.stored_bytes / self.stored_s / 1e9 if self.stored_s else 0.0

    @property
    def lookup_ms(self) -> float:
        """A lookup's mean time in milliseconds."""
        return 1e3 * self.lookup_s / self.lookups if self.lookups else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the counts and rates as JSON has them."""
        counts = {name: round(value, 6) for name, value in asdict(self).items()}
        return {
            **counts,
            "load_gb_s": round(self.load_gb_s, 4),
            "store_gb_s": round(self.store_gb_s, 4),
            "lookup_ms": round(self.lookup_ms, 4),
        }


@with_fields_of(StorePath)
class RedisTraffic(TypedDict):
    """What engines moved to and from Redis."""

    load_gb_s: float
    store_gb_s: float
    lookup_ms: float


def failed_calls(samples: Iterable[Sample]) -> dict[str, float] | None:
    """Return kind → failed calls to Redis, of a page or a difference of two; None as `read`."""
    mine = [sample for sample in samples if sample.name.startswith(PREFIX)]
    if not any(sample.name == f"{PREFIX}chunks_total" for sample in mine):
        return None
    found: dict[str, float] = {}
    for sample in mine:
        if sample.name == f"{PREFIX}failures_total" and sample.value:
            kind = sample.labels.get("kind", "error")
            found[kind] = found.get(kind, 0) + sample.value
    return found


def late_answers(samples: Iterable[Sample]) -> float:
    """Count answers that were sent before their KV was stored, with any of the clients."""
    waits = [sample for sample in samples if sample.name == f"{PREFIX}barrier_waits_total"]
    return sum(sample.value for sample in waits if sample.labels.get("result") != "stored")
