"""Limits of control groups, from files as kernels of both versions write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.runtime.cgroup import CgroupLimits, read_limits

GIB = 2**30


class Groups:
    """A tree of control groups, and which of them this process is in."""

    def __init__(self, folder: Path) -> None:
        self.mount, self.proc = folder / "cgroup", folder / "proc"
        self.mount.mkdir()

    def group(self, path: str, **files: object) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")

    def in_group(self, *lines: str) -> None:
        self.proc.write_text("\n".join(lines) + "\n")

    def limits(self) -> CgroupLimits:
        return read_limits(self.mount, self.proc)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def version_2(used: int = GIB, **files: object) -> dict[str, object]:
    return {"memory__current": used, "memory__stat": f"anon 1\ninactive_file {GIB // 4}", **files}


def test_there_are_no_limits_without_cgroups(groups: Groups) -> None:
    assert groups.limits() == CgroupLimits()


def test_a_container_sees_its_own_as_the_root(groups: Groups) -> None:
    groups.group("", **version_2(memory__max=4 * GIB, cpu__max="250000 100000"))
    groups.in_group("0::/")
    assert groups.limits() == CgroupLimits(4 * GIB, 3 * GIB + GIB // 4, 2.5)


def test_an_unlimited_group_has_no_limits(groups: Groups) -> None:
    groups.group("", **version_2(memory__max="max", cpu__max="max 100000"))
    groups.in_group("0::/")
    assert groups.limits() == CgroupLimits()


def test_the_limit_of_a_service_above_counts(groups: Groups) -> None:
    """A user's session in a slice with MemoryMax: the limit is two folders up."""
    groups.group("user.slice", **version_2(3 * GIB, memory__max=4 * GIB))
    groups.group("user.slice/session", **version_2(memory__max=8 * GIB, cpu__max="100000 100000"))
    groups.in_group("0::/user.slice/session")
    assert groups.limits() == CgroupLimits(4 * GIB, GIB + GIB // 4, 1.0)


def version_1(limit: int) -> dict[str, object]:
    return {
        "memory__limit_in_bytes": limit,
        "memory__usage_in_bytes": GIB,
        "memory__stat": f"cache 1\ntotal_inactive_file {GIB // 2}",
    }


def test_limits_of_cgroup_v1_are_read(groups: Groups) -> None:
    groups.group("memory/docker/abc", **version_1(2 * GIB))
    groups.group("memory", **version_1(9223372036854771712))
    groups.group("cpu/docker/abc", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    groups.group("cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    groups.in_group("5:memory:/docker/abc", "2:cpu,cpuacct:/docker/abc", "0::/")
    assert groups.limits() == CgroupLimits(2 * GIB, GIB + GIB // 2, 1.5)


def test_version_1_whose_path_is_not_mounted(groups: Groups) -> None:
    """In a container of version 1, the path is the host's, and its own group is the root."""
    groups.group("memory", **version_1(2 * GIB))
    groups.in_group("5:memory:/docker/abc")
    assert groups.limits().memory_bytes == 2 * GIB


@pytest.mark.parametrize("text", ["", "rubbish", "5:memory"])
def test_invalid_cgroup_files_have_no_limits(groups: Groups, text: str) -> None:
    groups.group("", memory__max="many", cpu__max="1")
    groups.in_group(text)
    assert groups.limits() == CgroupLimits()
