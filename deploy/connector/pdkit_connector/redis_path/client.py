"""One engine's worker and its Redis, one or several: look up, load and store values, within limits.

Failures of Redis never raise: what does not come in time is a miss, what cannot be stored is left
out. Both are counted, and logged once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdkit_connector.counters import Counters
from pdkit_connector.errors import ConnectorError
from pdkit_connector.log import get_logger
from pdkit_connector.redis_path.link import ReplyError, Timeouts
from pdkit_connector.redis_path.loads import Loads
from pdkit_connector.redis_path.lookups import Lookups
from pdkit_connector.redis_path.shards import Shards
from pdkit_connector.redis_path.stores import Stores
from pdkit_connector.redis_path.value import Codec
from pdkit_connector.registry import describe


@dataclass(frozen=True)
class Limits:
    """Limits of a client; the kit's plan sets those in seconds.

    Attributes:
        lookup_s: seconds after which a lookup is a miss.
        load_s: seconds after which the rest of a load is a miss.
        store_s: seconds after which storing a chunk is given up.
        silent_s: a load or store fails after this many seconds without a byte.
        load_lanes, store_lanes: connections for values in each direction; at least one per shard.
    """

    lookup_s: float = 0.5
    load_s: float = 60.0
    store_s: float = 60.0
    silent_s: float = 5.0
    load_lanes: int = 2
    store_lanes: int = 2


class Client:
    """`lookups`, `loads` and `stores`; connections are made by `open`, or when first needed.

    Raises ConnectorError where a URL is no address (see `address`).
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        codec: Codec,
        counters: Counters,
        limits: Limits | None = None,
    ) -> None:
        """Take the URL of one Redis, or of several that share the keys."""
        self._limits = limits = limits or Limits()
        self.shards = shards = Shards([urls] if isinstance(urls, str) else urls, counters, limits)
        self.lookups = Lookups(shards, counters, limits.lookup_s)
        load, store = (Timeouts(s, limits.silent_s) for s in (limits.load_s, limits.store_s))
        self.loads = Loads(shards, codec, counters, load)
        self.stores = Stores(shards, codec, counters, store)

    def troubles(self) -> Iterator[Exception]:
        """Ping each Redis; yield the failures."""
        for shard in self.shards:
            try:
                self.lookups.ping(shard)
            except Exception as exc:  # noqa: BLE001 - redis-py's own kinds, OSError, a lying server
                yield exc

    def open(self) -> None:
        """Begin to open the connections for values; to be called before the first load or store.

        It does not wait, and what fails is tried again when needed. Where names are found slowly,
        as after a restart, they are known by the time there is something to store.
        """
        self.shards.open()

    def close(self) -> None:
        """Finish the stores that began, within their limit, and close the connections."""
        self.shards.close(self._limits.store_s, self._limits.load_s)
        self.lookups.close()


def refuse_bad_login(client: Client) -> None:
    """Refuse a wrong password now, since every call would fail; Redis may start later.

    Raises:
        ConnectorError: Redis refuses this user or password.
    """
    for trouble in client.troubles():
        if _is_refusal(trouble):
            raise ConnectorError(f"Redis refuses this engine: {describe(trouble)}") from None
        get_logger().warning("pdkit-connector WARNING Redis does not answer: %s", describe(trouble))


def _is_refusal(error: Exception) -> bool:
    """Tell whether Redis refuses this user or password."""
    if isinstance(error, ReplyError):
        return error.code in ("NOAUTH", "WRONGPASS", "NOPERM")
    return type(error).__name__ in ("AuthenticationError", "NoPermissionError")
