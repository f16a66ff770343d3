"""Import torch and vLLM once, and do each job in a fork that puts a release of LMCache before them.

Reads a JSON list of jobs a line on stdin: {"release", "folder", "tests"}. Without tests a job is to
run all cells, else they are pytest's arguments. Prints a JSON object as each job ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Half of what a job does is waiting. A limit of a container is not among the cores.
AT_ONCE = min(8, 2 * len(os.sched_getaffinity(0)))

# What no release of LMCache brings, and each imports: seconds, where its own modules take tenths.
SHARED = (
    "torch",
    "vllm.config",
    "vllm.v1.request",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.multimodal.inputs",
    "redis.asyncio",
    "pytest",
)

Job = dict[str, Any]


def main() -> None:
    sys.path[:0] = [str(HERE), str(ROOT / "deploy" / "connector")]
    sys.path.append(str(ROOT))
    gc.disable()
    # vLLM logs to stdout, which here is for the answers alone.
    with contextlib.redirect_stdout(sys.stderr):
        for name in SHARED:
            importlib.import_module(name)
    assert not any(name.partition(".")[0] == "lmcache" for name in sys.modules), "a release is in"
    # What nobody collects need not be copied to be looked at.
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        do_all(json.loads(line))


def do_all(jobs: list[Job]) -> None:
    waiting, running = list(jobs), {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            job, output = waiting.pop(0), shared_output()
            running[begun(job, output)] = job, output
        child, status = os.wait()
        job, output = running.pop(child)
        with os.fdopen(output, errors="replace") as text:
            text.seek(0)
            said = text.read()
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({**job, "code": code, "said": said}), flush=True)


def shared_output() -> int:
    """Return a file in memory to which several processes may write at once."""
    output = os.memfd_create("output")
    # Else two that write at the same time may write to the same place, and one line is lost.
    fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    return output


def begun(job: Job, output: int) -> int:
    """Begin a job in a fork that prints into a file; return its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ["PYTHONPATH"] = job["folder"]
        sys.path.insert(0, job["folder"])
        code = tests_of(job["tests"]) if job["tests"] else cells()
        if code == 0:
            require_only(Path(job["folder"]))
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def tests_of(arguments: list[str]) -> int:
    import pytest

    os.chdir(ROOT)
    sys.path.insert(1, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        options = ("-q", "-p", "no:cacheprovider", f"--basetemp={folder}/t")
        return int(pytest.main([*options, *arguments]))


def cells() -> int:
    import trial

    return trial.main()


def require_only(folder: Path) -> None:
    """Fail where an LMCache other than the one in `folder` was imported."""
    files = [
        module.__file__
        for name, module in sys.modules.items()
        if name.startswith("lmcache.") and getattr(module, "__file__", None)
    ]
    strange = [file for file in files if not Path(file).is_relative_to(folder)]
    assert files and not strange, f"not of {folder}: {strange[:1]}"


if __name__ == "__main__":
    main()
