"""Run cells against the LMCache first on PYTHONPATH, untouched and fixed, each in its own process.

Usage: python trial.py --redis-port PORT [CELL ...]. Prints one JSON object a cell and side.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECONDS = 40

# What every process of a trial shares: imported once, before the first fork.
HEAVY = (
    "lmcache.v1.cache_engine",
    "lmcache.v1.storage_backend",
    "lmcache.v1.storage_backend.connector.redis_adapter",
    "lmcache.v1.gpu_connector",
    "lmcache.integration.vllm.vllm_v1_adapter",
)

Result = dict[str, Any]


class NotHere(Exception):
    """This release has not the feature in which the bug would be."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis-port", type=int, required=True)
    parser.add_argument("cells", nargs="*")
    options = parser.parse_args()
    sys.path[:0] = [str(HERE), str(ROOT / "deploy" / "connector")]
    # The cells raise this module's own class, which for them has another name than __main__.
    sys.modules["trial"] = sys.modules["__main__"]
    os.environ["REDIS_PORT"] = str(options.redis_port)
    for name in HEAVY:
        importlib.import_module(name)
    names = options.cells or sorted(path.stem for path in (HERE / "cells").glob("b*.py"))
    cells = [importlib.import_module(f"cells.{name}") for name in names]
    for cell in cells:
        tell(cell, "untouched", in_child(lambda cell=cell: run(cell.cell)))
    alone = [cell for cell in cells if hasattr(cell, "BITES") or hasattr(cell, "SETTING")]
    for cell in alone:
        tell(cell, "fixed", in_child(lambda cell=cell: fixed(cell)))
    if others := [cell for cell in cells if cell not in alone]:
        all_fixed(others)


def tell(cell: ModuleType, side: str, result: Result) -> None:
    print(json.dumps({"cell": name_of(cell), "side": side, **result}), flush=True)


def name_of(cell: ModuleType) -> str:
    return cell.__name__.rpartition(".")[2]


def own_fix(cell: ModuleType) -> Any:
    return importlib.import_module(f"pdkit_connector.fixes.{name_of(cell)}").FIX


def fixed(cell: ModuleType) -> Result:
    """Run a cell that wants a setting of its own; a guard is asked alone, all others together."""
    from pdkit_connector.errors import UnsupportedSetting
    from pdkit_connector.registry import Registry, discover

    own, bites = own_fix(cell), getattr(cell, "BITES", None)
    setting = bites or cell.SETTING
    try:
        outcomes = Registry((own,) if bites else discover()).apply(
            setting() if callable(setting) else setting, ()
        )
    except UnsupportedSetting as exc:
        return {"id": own.id, "result": "refused", "detail": str(exc)}
    return {**state_of(cell, outcomes), **run(cell.cell)}


def all_fixed(cells: Sequence[ModuleType]) -> None:
    """Apply all fixes, as they meet in an engine, in one process, and run each cell in a fork."""
    from pdkit_connector.registry import Registry, discover
    from pdkit_connector.setting import Setting

    if (child := os.fork()) == 0:
        outcomes = Registry(discover()).apply(Setting(), ())
        for cell in cells:
            told = state_of(cell, outcomes)
            tell(cell, "fixed", {**told, **in_child(lambda cell=cell: run(cell.cell))})
        os._exit(0)
    os.waitpid(child, 0)


def state_of(cell: ModuleType, outcomes: Sequence[Any]) -> Result:
    outcome = next(o for o in outcomes if o.fix.id == own_fix(cell).id)
    return {"id": outcome.fix.id, "state": outcome.state.value, "evidence": outcome.evidence}


def run(cell: Callable[[], None]) -> Result:
    """Return how a cell ended, and the seconds it took."""
    began = time.monotonic()
    ended = _ended(cell)
    return {**ended, "seconds": round(time.monotonic() - began, 2)}


def _ended(cell: Callable[[], None]) -> Result:
    try:
        cell()
    except NotHere as exc:
        return {"result": "not here", "detail": str(exc)}
    except Exception as exc:  # noqa: BLE001 - any way to end is a result
        traceback.print_exc()
        return {"result": "failed", "detail": f"{type(exc).__name__}: {exc}".splitlines()[0]}
    return {"result": "passed", "detail": ""}


def in_child(work: Callable[[], Result]) -> Result:
    """Return what `work` gives in a forked process, which cannot spoil this one or hang it."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as answer:
        if (child := os.fork()) == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            answer.write(json.dumps(work()).encode())
            answer.flush()
            os._exit(0)
        with time_limit(child):
            os.waitpid(child, 0)
        answer.seek(0)
        output.seek(0)
        result = answer.read()
        if not result:
            result = json.dumps({"result": "failed", "detail": "hung or crashed"}).encode()
        return {**json.loads(result), "output": output.read()[-4000:].decode(errors="replace")}


@contextlib.contextmanager
def time_limit(child: int) -> Iterator[None]:
    """Kill `child` after SECONDS."""
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
