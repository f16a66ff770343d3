"""Redis in a container without a published port: commands run inside, by redis-cli."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from deploy.metrics.store_stats import StoreStats
from deploy.runtime.compose.containers import FoundContainer
from deploy.runtime.store import Refusal, info_fields, stats_from
from deploy.stack.layout import SECRETS

# The password goes to redis-cli by stdin: arguments and environments are visible to others.
_ASK = f"{{ printf 'AUTH '; cat {SECRETS}/redis_password; printf '%s\\n' \"$@\"; }} | redis-cli"

# Finds all keys that contain ARGV[1] in one call, since each call is a process in the container. A
# stack of containers has about ten thousand keys at most. Returns the number of keys, then the
# keys: an error is neither.
_FIND = (
    "local found, cursor = {}, '0' "
    "repeat "
    "local page = redis.call('SCAN', cursor, 'MATCH', '*' .. ARGV[1] .. '*', 'COUNT', 1000) "
    "cursor = page[1] "
    "for _, key in ipairs(page[2]) do found[#found + 1] = key end "
    "until cursor == '0' "
    "table.insert(found, 1, tostring(#found)) "
    "return found"
)

# Each key is an argument of a process, which may have 2 MiB of them.
_KEYS_AT_ONCE = 1000


class ContainerStore:
    """A stack's Redis, by `redis-cli` in its container.

    Args:
        run: runs a command in the container and returns its stdout; None if none runs.
    """

    def __init__(self, run: Callable[[Sequence[str]], bytes] | None) -> None:
        self._run = run

    def ping(self) -> bool:
        return self._ask("PING").split() == ["OK", "PONG"]

    def refusal(self) -> Refusal | None:
        """Return Redis's error message if it refuses to serve; None if it serves or is silent."""
        lines = [line.strip() for line in self._ask("PING").splitlines() if line.strip()]
        if not lines or lines == ["OK", "PONG"]:
            return None
        denied = lines[0] != "OK"  # the answer to AUTH
        return Refusal(lines[0] if denied else lines[-1], denied)

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""
        answer = self._ask("INFO", "INFO commandstats", "DBSIZE")
        fields = info_fields(answer)
        keys = next((int(line) for line in answer.split("\n") if line.strip().isdigit()), None)
        try:
            return stats_from(fields, keys) if keys is not None else None
        except ValueError:
            return None

    def marked_keys(self, mark: str) -> set[bytes] | None:
        """Return the keys that contain a mark, or None if Redis does not answer."""
        lines = self._ask(f'EVAL "{_FIND}" 0 {mark}').splitlines()
        if len(lines) < 2 or lines[:2] != ["OK", str(len(lines) - 2)]:
            return None
        return {line.encode() for line in lines[2:]}

    def unlink(self, keys: Sequence[bytes]) -> int | None:
        """Remove what there is of the keys, or return None if Redis does not answer."""
        removed = 0
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[first : first + _KEYS_AT_ONCE]
            lines = self._ask(*(f"UNLINK {_quoted(key)}" for key in some)).split()
            if lines[:1] != ["OK"] or not all(line.isdigit() for line in lines[1:]):
                return None
            removed += sum(map(int, lines[1:]))
        return removed

    def _ask(self, *commands: str) -> str:
        """Return Redis's answer to the password and to commands; "" without one."""
        if self._run is None:
            return ""
        try:
            return self._run(("sh", "-c", _ASK, "sh", *commands)).decode("utf-8", "replace")
        except OSError:  # the engine did not run it
            return ""


def _quoted(word: bytes) -> str:
    """Return a word as redis-cli reads it on a line of its input."""
    plain = (
        chr(byte) if 32 < byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word
    )
    return f'"{"".join(plain)}"'


def open_container_store(
    container: FoundContainer | None,
) -> AbstractContextManager[ContainerStore]:
    """Return Redis in a container, for a with block; None is one that does not run."""
    return nullcontext(ContainerStore(container.run if container else None))
