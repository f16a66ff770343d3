"""CPU time and memory of a process with a child, whatever else the machine does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from deploy.runtime.usage import UsageMeter

WORKER = """
import subprocess, sys, time
def work(limit):
    while time.process_time() < limit:
        pass
if len(sys.argv) > 1:
    child = subprocess.Popen((sys.executable, "-c", sys.argv[1]), stdin=-1, stdout=-1, text=True)
    child.stdout.readline()
held = bytearray(50 << 20)
print("ready", flush=True)
sys.stdin.readline()
work(time.process_time() + 0.3)
if len(sys.argv) > 1:
    child.stdin.write("go\\n"); child.stdin.flush()
    child.stdout.readline()
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    argv = (sys.executable, "-c", WORKER, WORKER)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdin
        process.stdout.readline()
        yield process
        process.stdin.close()


def test_counts_a_process_with_its_descendants(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin and worker.stdout
    with UsageMeter({"worker": worker.pid, "gone": 0}) as meter:
        worker.stdin.write("go\n")
        worker.stdin.flush()
        worker.stdout.readline()
    assert 0.55 <= meter.cpu_s["worker"] < 1.5  # 0.3 s each, in steps of 10 ms
    assert meter.peak_rss_bytes["worker"] > 100 << 20
    assert (meter.cpu_s["gone"], meter.peak_rss_bytes["gone"]) == (0, 0)


def test_an_idle_process_uses_no_cpu(worker: subprocess.Popen[str]) -> None:
    with UsageMeter({"worker": worker.pid}) as meter:
        pass
    assert meter.cpu_s["worker"] < 0.1
