"""What vLLM would spawn is forked instead, with what was imported and today's environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from own_process import last_line, run_python
from pdkit_connector import fork_server, serve

SCRIPT = """
import gc, json, multiprocessing, os, sys
from pdkit_connector import fork_server

def look(queue, generations):
    if generations > 1:
        os.environ["CHANGED"] = "later"
        sys.exit(start(queue, generations - 1))
    names = "CHANGED", "ADDED", "TAKEN"
    queue.put([getattr(sys, "seen", None), [os.environ.get(n) for n in names], gc.isenabled()])
    sys.exit(7)

def start(queue, generations):
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=look, args=(queue, generations))
    process.start()
    process.join(60)
    return process.exitcode

if __name__ == "__main__":
    sys.seen = "imported before"
    gc.disable()
    if sys.argv[1] == "fork":
        fork_server.start()
    os.environ.update(CHANGED="after", ADDED="1")
    del os.environ["TAKEN"]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    code = start(queue, int(sys.argv[2]))
    print(json.dumps([*queue.get(), code]))
"""


def started(tmp_path: Path, how: str, *, generations: int = 1) -> list[object]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {"CHANGED": "before", "TAKEN": "1"}
    return json.loads(run_python(str(script), how, str(generations), **environ).stdout)


def test_a_forked_process_has_the_imports_and_the_current_environment(tmp_path):
    assert started(tmp_path, "fork") == ["imported before", ["after", "1", None], True, 7]


def test_a_forked_process_forks_too(tmp_path):
    """As vLLM's core starts its workers."""
    forked = ["imported before", ["later", "1", None], True, 7]
    assert started(tmp_path, "fork", generations=2) == forked


def test_a_spawned_process_has_no_imports(tmp_path):
    """Without the fork server: what the test above would see if it did nothing."""
    assert started(tmp_path, "spawn") == [None, ["after", "1", None], True, 7]


@pytest.fixture
def asked(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(fork_server, "preload", lambda: calls.append("preload"))
    monkeypatch.setattr(serve, "sleep_between_polls", lambda: calls.append("polls"))
    monkeypatch.setattr(serve, "allow_amx", lambda: calls.append("AMX"))
    monkeypatch.setattr(fork_server, "start", lambda: calls.append("start"))
    return calls


@pytest.mark.parametrize(
    ("cpu", "calls"), [(True, ["preload", "polls", "AMX", "start"]), (False, [])]
)
def test_only_cpu_engines_fork(monkeypatch, asked, cpu, calls):
    """A GPU's driver does not survive a fork."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _self: cpu)
    serve.fork_cores_on_cpus()
    assert asked == calls


AMX = """
import ctypes, sys
from pdkit_connector import serve

ARCH_PRCTL, GET_XCOMP_SUPP, GET_XCOMP_PERM, TILE_DATA = 158, 0x1021, 0x1022, 18

def has_tiles(question):
    features = ctypes.c_ulong()
    ctypes.CDLL(None).syscall(ARCH_PRCTL, question, ctypes.byref(features))
    return bool(features.value >> TILE_DATA & 1)

before = has_tiles(GET_XCOMP_PERM)
serve.allow_amx()
print(before, has_tiles(GET_XCOMP_PERM) == has_tiles(GET_XCOMP_SUPP))
"""


def test_amx_may_be_used_before_the_first_large_product():
    """On a processor without AMX there is nothing to allow, and nothing fails.

    The kernel knows whether this one has it; what /proc/cpuinfo shows may be a simulated machine's.
    """
    assert run_python("-c", AMX).stdout.split() == ["False", "True"]


WAIT = """
import resource, threading
from pdkit_connector import serve
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

writer = MessageQueue(n_reader=1, n_local_reader=1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
ready = threading.Thread(target=writer.wait_until_ready)
ready.start()
reader.wait_until_ready()
ready.join()
writer.enqueue("a message, after which readers are quick for a second")
assert reader.dequeue().startswith("a message")

def waits():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    try:
        reader.dequeue(timeout=0.4)
    except TimeoutError:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before

yielding = waits()
serve.sleep_between_polls()
print(yielding, waits())
"""


def test_waiting_for_a_message_leaves_the_processor_to_others():
    """As the kernel counts how often a process gave its core away; vLLM itself does not."""
    yielding, sleeping = map(int, last_line(WAIT).split())
    assert yielding <= 20 < sleeping
