"""The kit's router with a known cost on top of each request, which a benchmark must find.

python -m bench.router.slower MICROSECONDS [ARGUMENT OF THE ROUTER]...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

Serve = Callable[[Any, Any, Any], Awaitable[None]]


def slower(serve: Serve, spin_us: float) -> Serve:
    """Return what does the same, and keeps the processor busy first."""

    async def spin_and_serve(door: Any, request: Any, answer: Any) -> None:
        until = time.thread_time_ns() + 1000 * spin_us
        while time.thread_time_ns() < until:
            pass
        await serve(door, request, answer)

    return spin_and_serve


def main() -> None:
    """Run the router until it is told to stop."""
    from pdkit_router import __main__ as router  # of the tree that is measured
    from pdkit_router import metrics

    serve = slower(metrics.FrontDoor.serve, float(sys.argv.pop(1)))
    metrics.FrontDoor.serve = serve  # type: ignore[method-assign, assignment]
    router.main()


if __name__ == "__main__":
    main()
