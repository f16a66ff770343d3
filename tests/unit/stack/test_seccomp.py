"""The system call filter of ROCm engines: what it refuses, and what it must not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.assets import asset

EPERM, ENOSYS = 1, 38
# By which ROCm places memory, and shares it between the processes of an engine.
NEEDED = {"mbind", "set_mempolicy", "get_mempolicy", "move_pages", "process_vm_readv", "ioctl"}


@pytest.fixture
def profile() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asset("compose", "seccomp-rocm.json").read_text())
    return found


def refused(profile: dict[str, Any]) -> dict[str, int]:
    """Return call → error of what is refused whatever its arguments."""
    rules = [rule for rule in profile["syscalls"] if "args" not in rule]
    return {name: rule["errnoRet"] for rule in rules for name in rule["names"]}


def test_every_rule_refuses_and_says_why(profile: dict[str, Any]) -> None:
    for rule in profile["syscalls"]:
        assert rule["action"] == "SCMP_ACT_ERRNO" and rule["comment"]
    names = [name for rule in profile["syscalls"] for name in rule["names"]]
    assert len(names) == len(set(names))


def test_ways_out_of_a_container_are_refused(profile: dict[str, Any]) -> None:
    for name in ("mount", "unshare", "setns", "bpf", "keyctl", "init_module", "open_by_handle_at",
                 "userfaultfd", "perf_event_open", "io_uring_setup", "pivot_root"):  # fmt: skip
        assert refused(profile)[name] == EPERM, name


def test_the_profile_blocks_what_dockers_does_except_what_rocm_needs(
    profile: dict[str, Any],
) -> None:
    """What the documentation of Docker's profile names as blocked, on this architecture.

    By arguments it blocks clone, and some of what personality sets: the address randomization of
    the process itself, and emulations of other systems.
    """
    named = """acct add_key bpf clock_adjtime clock_settime create_module delete_module finit_module
        get_mempolicy init_module ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie
        mbind mount move_pages nfsservctl open_by_handle_at perf_event_open pivot_root
        process_vm_readv process_vm_writev query_module quotactl reboot request_key set_mempolicy
        setns settimeofday swapon swapoff sysfs _sysctl umount2 unshare uselib userfaultfd ustat"""
    permitted = {name for name in named.split() if name not in refused(profile)}
    assert permitted <= NEEDED | {"process_vm_writev"}


def test_new_user_namespaces_are_refused_and_threads_are_not(profile: dict[str, Any]) -> None:
    """clone3 is said not to exist, at which C libraries use clone, whose flags a filter sees."""
    assert refused(profile)["clone3"] == ENOSYS
    (rule,) = [rule for rule in profile["syscalls"] if rule["names"] == ["clone"]]
    clone_newuser = 0x10000000
    assert rule["args"] == [
        {"index": 0, "value": clone_newuser, "valueTwo": clone_newuser, "op": "SCMP_CMP_MASKED_EQ"}
    ]


def test_calls_that_rocm_needs_are_allowed(profile: dict[str, Any]) -> None:
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert not NEEDED & refused(profile).keys()


def test_other_architectures_are_blocked(profile: dict[str, Any]) -> None:
    """32-bit calls have numbers of their own, which these rules would miss."""
    assert profile["architectures"] == ["SCMP_ARCH_X86_64"]
