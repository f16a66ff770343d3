"""Removes the keys of a check that was killed: `python -m deploy.workflows.check.guard`.

Arguments: the kit's folders for state and caches, the stack, the run of the check.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from deploy.workflows.check.keys import DONE, mark

# Engines may go on storing what they were asked for; longer than one store may take, nothing comes.
_QUIET_S = 2.0
_LIMIT_S = 15.0
_POLL_S = 0.25


def main() -> None:
    state, cache, name, run = sys.argv[1:]
    if sys.stdin.buffer.read() == DONE:
        return
    # Only now: nobody waits for what is hardly ever needed.
    from deploy.runtime.home import Home
    from deploy.workflows.running import find_stack, store_of

    running = find_stack(Home(Path(state), Path(cache)), name)
    if running is None:
        return
    with store_of(running) as store:
        limit = time.monotonic() + _LIMIT_S
        quiet_until = time.monotonic() + _QUIET_S
        while time.monotonic() < min(limit, quiet_until):
            if store.remove_marked(mark(run)):
                quiet_until = time.monotonic() + _QUIET_S
            time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
