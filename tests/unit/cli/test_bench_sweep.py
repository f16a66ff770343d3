"""`deploy bench sweep` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.runtime import host
from deploy.runtime.lock import bench_lock
from tests.conftest import Ended

SWEEP = ("bench", "sweep", "--engines", "2", "--runtime", "process")


def test_a_second_sweep_at_once_is_an_error(
    deploy_here: Callable[..., Ended], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with bench_lock(home / "bench.lock"):
        ended = deploy_here(*SWEEP, cwd=tmp_path, home=home)
    assert ended.code == 3
    assert ended.stderr.splitlines()[-2].startswith("error: another deploy bench is running")


def test_a_dry_run_starts_and_leaves_nothing(
    deploy_here: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory_mib", lambda: 1 << 20)
    home = tmp_path / "home"
    (tmp_path / "deploy.yaml").write_text("redis: {memory_gib: 0.1}\nengine: {kv_cache_gib: 0.1}\n")
    ended = deploy_here(*SWEEP, "--dry-run", "--rounds", "1", "--json", cwd=tmp_path, home=home)
    assert ended.code == 0, ended.stderr
    data = json.loads(ended.stdout)["data"]
    assert [run["topology"] for run in data["runs"]] == ["2a", "2a+redis", "1p1d"]
    assert data["seconds"] > 0
    assert not list(home.glob("bench/*"))


def test_one_that_is_too_big_is_left_out_of_the_dry_run_with_its_reason(
    deploy_here: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory_mib", lambda: 12 << 10)
    (tmp_path / "deploy.yaml").write_text("redis: {memory_gib: 0.1}\nengine: {kv_cache_gib: 0.1}\n")
    options = ("--runtime", "process", "--vendor", "cpu", "--topologies", "1a,1p1d,9a", "--dry-run")
    ended = deploy_here("bench", "sweep", *options, cwd=tmp_path, home=tmp_path / "home")
    assert ended.code == 0, ended.stderr
    assert "left out: 9a: the stack's 9 engines and Redis are expected to need" in ended.stdout
    assert "10 runs" in ended.stdout
    alone = [one.replace("1a,", "") for one in options]
    ended = deploy_here("bench", "sweep", *alone, cwd=tmp_path, home=tmp_path / "home")
    assert ended.code == 3
    assert "nothing to compare 1p1d with; 9a: the stack's 9 engines" in ended.stderr


def test_too_many_engines_are_refused_by_the_planner(
    deploy_here: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory_mib", lambda: 1024)
    (tmp_path / "deploy.yaml").write_text("engine: {kv_cache_gib: 0.1}\n")
    ended = deploy_here(*SWEEP, cwd=tmp_path, home=tmp_path / "home")
    assert ended.code == 3
    error, hint = ended.stderr.splitlines()[-2:]
    assert error.startswith("error: the stack's 2 engines and Redis are expected to need")
    assert error.endswith("but 1.0 GiB are available")
    assert hint.startswith("try: ")
    assert not list((tmp_path / "home").glob("stacks/*"))
