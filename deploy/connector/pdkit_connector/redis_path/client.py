"""One engine's worker and its Redis: look up, load and store values, within limits.

No call raises for what Redis does: what cannot be had in time is a miss, what cannot be stored is
left out. Both are counted, and told once.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkit_connector.counters import Counters
from pdkit_connector.redis_path.address import parse
from pdkit_connector.redis_path.attempts import Attempts
from pdkit_connector.redis_path.lanes import Lanes, Links
from pdkit_connector.redis_path.loads import Loads
from pdkit_connector.redis_path.lookups import Lookups
from pdkit_connector.redis_path.stores import Stores
from pdkit_connector.redis_path.topology import topology
from pdkit_connector.redis_path.value import Codec


@dataclass(frozen=True)
class Limits:
    """Limits of a client.

    Attributes:
        lookup_s: seconds after which a lookup is a miss.
        load_s: seconds after which what has not come of a prompt is a miss.
        store_s: seconds after which a chunk that was handed over is given up.
        load_lanes, store_lanes: connections that values move over, each way.
        queued_bytes: payload that may wait to be stored; more is not stored.
    """

    lookup_s: float = 0.5
    load_s: float = 5.0
    store_s: float = 10.0
    load_lanes: int = 2
    store_lanes: int = 2
    queued_bytes: int = 1 << 30


class Client:
    """`lookups`, `loads` and `stores` of one Redis; nothing is connected before it is needed.

    Raises ConnectorError where the URL is no address (see `address`).
    """

    def __init__(
        self, url: str, codec: Codec, counters: Counters, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        where = topology(parse(url))

        def links() -> Links:
            return Links(where, counters)

        reads, writes = Attempts("reading", counters), Attempts("storing", counters)
        self._limits = limits
        self._load_lanes = Lanes("load", limits.load_lanes, links)
        self._store_lanes = Lanes("store", limits.store_lanes, links)
        self.lookups = Lookups(links(), reads, counters, limits.lookup_s)
        self.loads = Loads(self._load_lanes, codec, reads, counters, limits.load_s)
        self.stores = Stores(
            self._store_lanes, codec, writes, counters, limits.store_s, limits.queued_bytes
        )

    def close(self) -> None:
        """Finish the stores that began, within their limit, and close the connections."""
        self._store_lanes.close(self._limits.store_s)
        self._load_lanes.close(self._limits.load_s)
        self.lookups.close()
