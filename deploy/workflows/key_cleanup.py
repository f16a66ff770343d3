"""Cleans up after a check that was killed: `python -m deploy.workflows.key_cleanup`.

Every check starts it and waits for its end, so it imports little until there is work.

Arguments: the kit's folders for state and caches, the stack, the run whose keys are to be removed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# The word that means that there is nothing to clean up.
DONE = b"done"
TAG = "pdkit"
# Engines may still store KV of earlier requests, for as long as one store may take.
_QUIET_S = 2.0
_LIMIT_S = 15.0
_POLL_S = 0.25

if TYPE_CHECKING:
    from deploy.workflows.running import RunningStack


def mark(tag: str) -> str:
    """Return the text that keys of a tag contain, and of tags that begin with it."""
    return f"@{TAG}%{tag}"


def main() -> None:
    """Wait on stdin; if it ends without the word that the check is done, remove what it left."""
    state, cache, name, run = sys.argv[1:]
    if sys.stdin.buffer.read() == DONE:
        return
    from deploy.errors import PdkitError
    from deploy.runtime.home import Home
    from deploy.workflows.running import find_stack

    home, tags = Home(Path(state), Path(cache)), [run]
    with contextlib.suppress(PdkitError):
        if running := find_stack(home, name):
            if not _is_recorded(canary_of(run), home.canaries_file(name)):
                tags.append(canary_of(run))
            remove_keys(running, *tags)


def canary_of(run: str) -> str:
    """Return the tag of the canary that a run of a check leaves."""
    return f"canary-{run.rpartition('-')[2]}"


def _is_recorded(canary: str, file: Path) -> bool:
    try:
        return canary.encode() in file.read_bytes()
    except OSError:
        return False


def remove_keys(running: RunningStack, *tags: str) -> None:
    """Remove the keys of a run of a check, also those that engines still store."""
    from deploy.workflows.running import store_of

    with store_of(running) as store:
        limit = time.monotonic() + _LIMIT_S
        quiet_until = time.monotonic() + _QUIET_S
        while time.monotonic() < min(limit, quiet_until):
            for tag in tags:
                if store.remove_marked(mark(tag)):
                    quiet_until = time.monotonic() + _QUIET_S
            time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
