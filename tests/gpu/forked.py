"""Work in forks of a process that has imported vLLM once."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def in_fork(work: Callable[[], Any]) -> Any:
    """Return what `work` gives in a fork of this process, or how it failed."""
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with os.fdopen(reading) as answer:
            said = answer.read()
        os.waitpid(child, 0)
        return json.loads(said or '{"failed": "crashed"}')
    try:
        told = work()
    except BaseException as exc:  # noqa: BLE001 - any end is told
        traceback.print_exc()
        told = {"failed": f"{type(exc).__name__}: {exc}"}
    with suppress(BaseException), os.fdopen(writing, "w") as answer:
        json.dump(told, answer)
    sys.stderr.flush()
    os._exit(0)
