"""Run all cells on the LMCache first on sys.path, untouched and fixed, each in its own process.

Prints one JSON object a cell and side. Both sides run at once, each with its own Redis.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.redis_server import RedisServer

HERE = Path(__file__).resolve().parent

# No cell takes a tenth of that; one that is killed after it has failed.
SECONDS = 120

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


def main() -> int:
    """Run all cells; return 0 where both sides came to their ends."""
    for name in HEAVY:
        importlib.import_module(name)
    names = sorted(path.stem for path in (HERE / "cells").glob("b*.py"))
    cells = [importlib.import_module(f"cells.{name}") for name in names]
    gc.freeze()
    sides = [on_its_redis(untouched_and_alone, cells), on_its_redis(all_fixed, cells)]
    statuses = [os.waitpid(side, 0)[1] for side in sides]
    return int(any(statuses))


def on_its_redis(work: Callable[[Sequence[ModuleType]], None], cells: Sequence[ModuleType]) -> int:
    """Begin `work` in a fork that has a Redis, since cells empty it; return the process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
            os.environ["REDIS_PORT"] = str(server.port)
            work(cells)
        code = 0
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
    finally:
        os._exit(code)


def untouched_and_alone(cells: Sequence[ModuleType]) -> None:
    """Run each cell on the release as it is, and those that want a setting of their own fixed."""
    for cell in cells:
        tell(cell, "untouched", in_child(lambda cell=cell: run(cell.cell)))
    for cell in filter(is_alone, cells):
        tell(cell, "fixed", in_child(lambda cell=cell: fixed(cell)))


def all_fixed(cells: Sequence[ModuleType]) -> None:
    """Apply all fixes, as they meet in an engine, and run each cell in a fork."""
    from pdkit_connector.registry import Registry, Setting, discover

    outcomes = Registry(discover()).apply(Setting(), ())
    gc.freeze()
    for cell in cells:
        if not is_alone(cell):
            told = state_of(cell, outcomes)
            tell(cell, "fixed", {**told, **in_child(lambda cell=cell: run(cell.cell))})


def is_alone(cell: ModuleType) -> bool:
    return hasattr(cell, "BITES") or hasattr(cell, "SETTING")


def tell(cell: ModuleType, side: str, result: Result) -> None:
    # In one write: the other side tells at the same time, to the same file.
    line = json.dumps({"cell": name_of(cell), "side": side, **result})
    os.write(1, f"{line}\n".encode())


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
