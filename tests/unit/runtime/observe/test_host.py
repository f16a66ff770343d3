"""The kernel's settings from files, and limits that a shell really has set."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.runtime.cgroup import CgroupLimits
from deploy.runtime.detect.tool import Tools
from deploy.runtime.observe import clock_is_synced, place, see_host
from tests.conftest import plain_environ

LOOK = "from deploy.runtime.observe import see_host; h = see_host(); print({})"


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_kernel_settings_are_read_from_files(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        sys__kernel__mm__transparent_hugepage__enabled="[always] madvise never\n",
        proc__sys__vm__overcommit_memory="2\n",
        proc__sys__kernel__numa_balancing="1\n",
        proc__cpuinfo="processor : 0\nflags\t\t: fpu avx2 amx_bf16\nprocessor : 1\nflags : x\n",
        sys__devices__system__node__node0__cpulist="0-31\n",
        sys__devices__system__node__node10__cpulist="64-95\n",
        sys__devices__system__node__node2__cpulist="32-63\n",
    )
    (root / "dev" / "shm").mkdir(parents=True)
    seen = see_host(root, CgroupLimits(cpus=1.5))
    assert (seen.huge_pages, seen.overcommit, seen.numa_balancing) == ("always", 2, True)
    assert seen.cpu_flags == {"fpu", "avx2", "amx_bf16"}
    assert list(seen.numa.items()) == [(0, "0-31"), (2, "32-63"), (10, "64-95")]
    assert seen.cpu_quota == 1.5
    assert seen.shm_free_mib is not None and seen.shm_free_mib > 0
    assert seen.now is not None and abs(seen.now - time.time()) < 60


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    seen = see_host(tmp_path, CgroupLimits())
    assert (seen.huge_pages, seen.overcommit, seen.shm_free_mib) == ("", None, None)
    assert (seen.cpu_flags, dict(seen.numa), seen.numa_balancing) == (frozenset(), {}, False)


def test_this_machine_can_be_read() -> None:
    seen = see_host()
    assert seen.cpus == len(os.sched_getaffinity(0))
    assert seen.numa and seen.overcommit is not None


@pytest.mark.parametrize(
    ("limit", "attribute", "seen"),
    [("ulimit -n 200", "open_files", "200"), ("ulimit -l 64", "locked_kib", "64")],
)
def test_limits_of_the_shell_it_is_called_from(limit: str, attribute: str, seen: str) -> None:
    look = shlex.join((sys.executable, "-c", LOOK.format(f"h.{attribute}")))
    done = subprocess.run(
        ("sh", "-c", f"{limit}; exec {look}"),
        env=plain_environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == seen


class TestClock:
    @pytest.mark.parametrize(("said", "synced"), [("yes", True), ("no", False), ("", None)])
    def test_the_clock_state_is_read(self, tmp_path: Path, said: str, synced: bool | None) -> None:
        self.tool(tmp_path, f"echo {said}")
        assert clock_is_synced(Tools({"PATH": str(tmp_path)}, tmp_path)) is synced

    def test_a_timedatectl_that_hangs_is_not_waited_for(self, tmp_path: Path) -> None:
        self.tool(tmp_path, "exec /bin/sleep 60")
        began = time.monotonic()
        assert clock_is_synced(Tools({"PATH": str(tmp_path)}, tmp_path, 0.2)) is None
        assert time.monotonic() - began < 5

    def test_the_clock_state_is_unknown_without_timedatectl(self, tmp_path: Path) -> None:
        assert clock_is_synced(Tools({"PATH": str(tmp_path)}, tmp_path)) is None

    @staticmethod
    def tool(folder: Path, script: str) -> None:
        (folder / "timedatectl").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "timedatectl").chmod(0o755)


class TestPlace:
    def test_a_folder_that_is_not_there_yet(self, tmp_path: Path) -> None:
        there, later = place(tmp_path), place(tmp_path / "a" / "b")
        assert later.path == str(tmp_path / "a" / "b")
        assert later.free_mib and there.free_mib and abs(later.free_mib - there.free_mib) < 1024
        assert later.writable is True

    def test_another_users_folder_is_not_checked_for_writing(self, tmp_path: Path) -> None:
        assert place(tmp_path, ours=False).writable is None

    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert place(tmp_path / "file" / "x").free_mib is not None
