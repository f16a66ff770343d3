"""A deploy.yaml of the current folder that names programs or addresses must be named first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.config.sources import REACHING
from deploy.config.spec import StackSpec
from tests.conftest import Ended

Run = Callable[..., Ended]

HOSTILE = "engine: {python: ./evil, env: {HF_ENDPOINT: 'http://evil.example'}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of someone else's, with a program that says that it ran."""
    made = tmp_path / "downloaded"
    made.mkdir()
    (made / "deploy.yaml").write_text(HOSTILE)
    (made / "evil").write_text("#!/bin/sh\ntouch ran\n")
    (made / "evil").chmod(0o755)
    return made


@pytest.mark.parametrize(
    "command", [("up", "--dry-run"), ("doctor",), ("plan",), ("render",), ("up",)]
)
def test_nothing_in_a_found_file_runs_without_consent(
    deploy_here: Run, folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    ended = deploy_here(
        *command, "--vendor", "cpu", "--runtime", "process", cwd=folder, home=tmp_path / "home"
    )
    assert ended.code == 2
    assert "deploy.yaml sets engine.python, engine.env" in ended.stderr
    assert "-f deploy.yaml" in ended.stderr
    assert not (folder / "ran").exists()


def test_a_found_file_cannot_name_the_redis_whose_keys_are_deleted(
    deploy_here: Run, tmp_path: Path
) -> None:
    (tmp_path / "deploy.yaml").write_text("redis: {url_file: ./url}\n")
    (tmp_path / "url").write_text("redis://127.0.0.1:9/0\n")

    def down(*options: str) -> Ended:
        return deploy_here("down", *options, cwd=tmp_path, home=tmp_path / "home")

    refused = down("--volumes")
    assert refused.code == 2
    assert "deploy.yaml sets redis.url_file" in refused.stderr
    assert down().code == 0, "it reaches nothing"
    named = down("--volumes", "-f", "deploy.yaml")
    assert named.code != 2 and "keys pdkit:" in named.stderr, named


def test_a_named_file_is_trusted_until_it_changes(deploy_here: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = tmp_path / "deploy.yaml"
    file.write_text("redis: {server: /bin/true}\n")

    def plan(*options: str, **environ: str) -> int:
        settled = ("--vendor", "cpu", "--runtime", "process", "--model", "tiny")
        return deploy_here("plan", *settled, *options, cwd=tmp_path, home=home, **environ).code

    assert plan() == 2
    assert plan("-f", "deploy.yaml") == 0
    assert plan() == 0
    file.write_text("redis: {server: /bin/false}\n")
    assert plan() == 2
    assert plan(PDKIT_FILE="deploy.yaml") == 0
    file.write_text("topology: 1p2d\n")
    assert plan() == 0, "a file that names nothing needs no consent"


def test_flags_need_no_consent(deploy_here: Run, tmp_path: Path) -> None:
    (tmp_path / "deploy.yaml").write_text("bind: 127.0.0.2\n")
    options = ("--vendor", "cpu", "--runtime", "process", "--model", "tiny")
    ended = deploy_here("plan", *options, cwd=tmp_path, home=tmp_path / "home")
    assert ended.code == 2
    overruled = deploy_here(
        "plan", *options, "--bind", "127.0.0.1", cwd=tmp_path, home=tmp_path / "home"
    )
    assert overruled.code == 0


def test_every_setting_is_classified() -> None:
    """Who adds a setting says whether a file of some folder may set it."""
    harmless = {
        "name", "vendor", "runtime", "gpus", "topology", "producers", "consumers", "tp",
        "producer_tp", "consumer_tp", "allow_untested", "gpu_access", "connector", "layerwise",
        "save_decode_cache", "model", "port", "supervise",
        "engine.dtype", "engine.block_size", "engine.max_model_len",
        "engine.kv_cache_gib", "engine.gpu_memory", "engine.memory_gib", "lmcache.chunk_size",
        "lmcache.staging_gib", "lmcache.server_gib", "redis.client", "redis.integrity",
        "redis.memory_gib",
        "redis.shards", "router.degrade", "slo.ttft_s", "slo.itl_s", "timeouts.ready_s",
        "timeouts.stop_s", "timeouts.hung_s", "timeouts.stuck_s",
    }  # fmt: skip
    known = set()
    for name, field in StackSpec.model_fields.items():
        parts = getattr(field.annotation, "model_fields", None)
        known |= {f"{name}.{part}" for part in parts} if parts else {name}
    assert known == harmless | set(REACHING)
    assert not harmless & set(REACHING)
