"""Run a command on a busy machine: python -m tests.busy SEED -- COMMAND [ARGUMENT …].

Every core is kept taken by bursts of other processes, each of one to three at once that use up to a
second of processor time. Which bursts follow each other depends on the seed alone, so that what
failed beside one can be tried beside the same again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

USAGE = "usage: python -m tests.busy SEED -- COMMAND [ARGUMENT ...]"
MOST_AT_ONCE, MOST_S = 3, 1.0
# Processor time, not time by the clock: a burst is as much work on a slow machine.
_BURST = """
import sys, time
while time.process_time() < float(sys.argv[1]): pass
"""


def bursts(seed: str, core: int) -> Iterator[tuple[float, ...]]:
    """Yield the processor seconds that each process of a burst uses, burst after burst."""
    chosen = random.Random(f"{seed} {core}")
    while True:
        yield tuple(chosen.uniform(0.05, MOST_S) for _ in range(chosen.randint(1, MOST_AT_ONCE)))


@contextmanager
def busy(seed: str) -> Iterator[None]:
    """Keep as many cores taken as this process may use."""
    ended, cores = threading.Event(), range(len(os.sched_getaffinity(0)))
    running: dict[int, list[subprocess.Popen[bytes]]] = {}

    def keep_taken(core: int) -> None:
        for burst in bursts(seed, core):
            if ended.is_set():
                return
            running[core] = [_burst(seconds) for seconds in burst]
            for process in running[core]:
                process.wait()

    threads = [threading.Thread(target=keep_taken, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for core, thread in zip(cores, threads, strict=True):
            for process in running.get(core, ()):
                process.kill()
            thread.join()  # at the end of a burst that was just begun


def _burst(seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen((sys.executable, "-S", "-c", _BURST, str(seconds)))


def main(arguments: Sequence[str]) -> int:
    """Return the exit code of the command."""
    seed, separator, *command = [*arguments, "", ""][: max(2, len(arguments))]
    if not seed or separator != "--" or not command:
        print(USAGE, file=sys.stderr)
        return 2
    with busy(seed):
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
