"""Operating-system sessions: start a program in a new one, find and end all its processes.

An engine starts helpers of its own. They share its session, so the session, not the one process,
is what is watched and ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import psutil

_POLL_S = 0.05
_TRACKER_GRACE_S = 1.0
_KILL_ROUNDS = 10  # one round is enough, unless a process starts others or hangs on a dead disk
_SHARED_MEMORY = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)
# LMCache and vLLM prefer these to what the plan says.
_OVER_THE_PLAN = ("LMCACHE_", "VLLM_", "PROMETHEUS_MULTIPROC_DIR")
# By these, libraries below vLLM compute other numbers. The identity of KV knows only what the plan
# and `engine.env` give: two shells would make different KV with the same keys.
_NUMBERS = (
    "AITER_", "CUBLASLT_", "CUBLAS_", "DNNL_", "FLASHINFER_", "FLASH_ATTENTION_", "FLA_",
    "HIPBLASLT_", "K_SCALE_CONSTANT", "NVIDIA_TF32_OVERRIDE", "ONEDNN_", "Q_SCALE_CONSTANT",
    "ROCBLAS_", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_F32_DEFAULT", "TRITON_INTERPRET",
    "V_SCALE_CONSTANT",
)  # fmt: skip


def spawn(
    argv: tuple[str, ...],
    env: Mapping[str, str],
    *,
    log: Path,
    cwd: Path,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program in a new session, its output appended to `log`.

    Raises:
        OSError: the program cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("ab") as sink:
        return subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )


def start_time(pid: int) -> float:
    """Return when a process started, in seconds since the boot; 0.0 if it is gone.

    It comes from the kernel's monotonic count, so equal values mean the same process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    # The name in parentheses may hold spaces; field 22 is the 20th after it (proc(5)).
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int, started: float) -> bool:
    """Tell whether this process runs, not another one with the same pid, nor a zombie."""
    try:
        return start_time(pid) == started and not has_ended(psutil.Process(pid))
    except psutil.Error:
        return False


def wait_for_an_end(pids: Iterable[int], timeout_s: float) -> bool:
    """Wait until one of the processes has ended, or the time is up; tell whether one has."""
    with contextlib.ExitStack() as stack:
        ends = []
        for pid in pids:
            try:
                ends.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return True
            stack.callback(os.close, ends[-1])
        return bool(select.select(ends, [], [], timeout_s)[0])


def session_members(session: int, started: float) -> list[psutil.Process]:
    """Return the living processes of a session whose leader started at `started`."""
    return _members({session: started})


def marked_sessions(variable: str, folder: Path) -> dict[int, float]:
    """Return session id → leader's start of every process that was started for `folder`.

    They have `variable` in their environment. A program that sets its title overwrites that; it is
    recognised by a working directory below the folder and no terminal, which no shell has. Only
    this user's count, for root also those of the folder's owner, and only this pid namespace: a
    container may have a stack of the same name in the same folder.
    """
    found: dict[int, float] = {}
    users = {os.getuid(), _owner(folder)} if os.getuid() == 0 else {os.getuid()}
    mark = os.fsencode(f"{variable}={folder}")
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            marked = mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            works_there = Path(process.cwd()).is_relative_to(folder) and not process.terminal()
            ours = process.uids().real in users and _is_in_our_namespace(process.pid)
            if (marked or works_there) and ours:
                session = os.getsid(process.pid)
                if session == os.getsid(0):
                    continue  # this command itself, run by a script in that folder
                oldest = min(start_time(process.pid), found.get(session, math.inf))
                found[session] = start_time(session) or oldest
    return found


def bears_another_mark(variable: str, folder: Path, session: int, started: float) -> bool:
    """Tell whether a process of a session is visibly marked for another folder."""
    mark, own = f"{variable}=".encode(), os.fsencode(f"{variable}={folder}")
    for process in session_members(session, started):
        with contextlib.suppress(OSError):  # of another user, or it cannot be looked into
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if any(one.startswith(mark) and one != own for one in environ):
                return True
    return False


def _owner(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return folder.stat().st_uid
    return os.getuid()


def _is_in_our_namespace(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()


def end_sessions(sessions: Mapping[int, float], *, grace_s: float) -> None:
    """End sessions together: TERM to the leaders, wait up to `grace_s`, KILL what is left.

    A leader ends its helpers in order; helpers without a leader have nothing to finish. Shared
    memory that only they had mapped is removed, because a killed worker leaves it behind.
    """
    members = _members(sessions)
    shared = _shared_memory_files(members)
    leaders = {process.pid: process for process in members if process.pid in sessions}
    _signal(leaders.values(), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(is_running(pid, sessions[pid]) for pid in leaders) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    # Python's resource trackers free shared memory and semaphores once all that used them are dead.
    _signal([p for p in _members(sessions) if not _is_resource_tracker(p)], signal.SIGKILL)
    _wait_until_gone(sessions, _TRACKER_GRACE_S)
    for _ in range(_KILL_ROUNDS):
        left = _members(sessions)
        if not left:
            break
        _signal(left, signal.SIGKILL)
        _wait_until_gone(sessions, 1.0)
    # The maps of a machine's processes are megabytes.
    for file in shared - _shared_memory_files(psutil.process_iter()) if shared else ():
        file.unlink(missing_ok=True)


def _shared_memory_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files in /dev/shm that any of the processes has mapped."""
    files: set[Path] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            files.update(Path(name) for name in _SHARED_MEMORY.findall(maps))
    return {file for file in files if file.exists()}


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _members(sessions: Mapping[int, float]) -> list[psutil.Process]:
    """Return the living processes of sessions, id → leader's start, by one look at them all.

    The kernel gives no new process a pid that is a session's id still in use, so if the leader's
    pid belongs to a process with another start, the session is gone. What is older than the
    leader, or another user's, was never in it.
    """
    there = {sid: start for sid, start in sessions.items() if start_time(sid) in (0.0, start)}
    members = []
    for process in psutil.process_iter() if there else ():
        with contextlib.suppress(OSError, psutil.Error):
            began = there.get(os.getsid(process.pid))
            if (
                began is not None
                and start_time(process.pid) >= began
                and process.uids().real == os.getuid()
                and not has_ended(process)
            ):
                members.append(process)
    return members


def has_ended(process: psutil.Process) -> bool:
    """Tell whether no thread is left: the last one to end closes the sockets."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _wait_until_gone(sessions: Mapping[int, float], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _members(sessions) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def kept_back(names: Iterable[str]) -> list[str]:
    """Return the names of those variables that services do not inherit."""
    return [name for name in names if name.startswith((*_OVER_THE_PLAN, *_NUMBERS))]
