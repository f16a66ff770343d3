"""One contender's process: takes operations from standard input, as many engines as asked for.

LMCache is imported once and every engine forked from that, so that 20 of them fit into memory.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from bench.redis_path.contender import Contender, Where
from bench.redis_path.contenders import CONTENDERS, check_surroundings, quiet


def main() -> None:
    name, engines, where = sys.argv[1], int(sys.argv[2]), Where(int(sys.argv[3]), sys.argv[4])
    faulthandler.register(signal.SIGUSR1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    quiet()
    if not name.startswith("raw"):
        check_surroundings(name)
        import lmcache.v1.storage_backend.remote_backend  # noqa: F401 - shared by all engines
    pipes = [_fork(name, engine, where) for engine in range(engines)]
    for line in sys.stdin:
        for pipe in pipes:
            pipe.send(json.loads(line))
        print(json.dumps([pipe.recv() for pipe in pipes]), file=answers, flush=True)
    for engine in multiprocessing.active_children():
        engine.kill()


def _fork(name: str, engine: int, where: Where) -> Connection:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    context.Process(target=_engine, args=(theirs, name, engine, where), daemon=True).start()
    return ours


def _engine(pipe: Connection, name: str, engine: int, where: Where) -> None:

    contender: Contender | None = None
    while True:
        asked = pipe.recv()
        try:
            contender = contender or CONTENDERS[name](where, engine)
            pipe.send(_done(contender, asked))
        except Exception as exc:  # noqa: BLE001 - whatever a contender raises is its result
            traceback.print_exc()
            pipe.send({"error": f"{type(exc).__name__}: {exc}"})


def _done(contender: Contender, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["do"] == "open":
        contender.open(asked["value_bytes"], asked["count"])
        return {}
    if asked["do"] == "lookup":
        return asdict(contender.lookup(asked["count"]))
    return asdict(contender.store() if asked["do"] == "store" else contender.retrieve())


if __name__ == "__main__":
    main()
