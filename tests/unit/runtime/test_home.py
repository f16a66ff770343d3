"""Where the kit keeps things."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.errors import ConfigError
from deploy.runtime.home import Home


def test_the_default_home_is_below_the_xdg_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    home = Home.from_environ({})
    assert home == Home(Path("/home/user/.local/state/pdkit"), Path("/home/user/.cache/pdkit"))


def test_xdg_variables_move_it() -> None:
    home = Home.from_environ({"XDG_STATE_HOME": "/state", "XDG_CACHE_HOME": "/cache"})
    assert home == Home(Path("/state/pdkit"), Path("/cache/pdkit"))


def test_pdkit_home_holds_everything() -> None:
    home = Home.from_environ({"PDKIT_HOME": "/kit", "XDG_STATE_HOME": "/state"})
    assert home == Home(Path("/kit"), Path("/kit/cache"))


def test_empty_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    empty = {"PDKIT_HOME": "", "XDG_STATE_HOME": "", "XDG_CACHE_HOME": ""}
    assert Home.from_environ(empty) == Home.from_environ({})


def test_a_relative_home_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Home.from_environ({"PDKIT_HOME": "kit"}).state == tmp_path / "kit"


def test_a_home_below_the_users() -> None:
    assert Home.from_environ({"PDKIT_HOME": "~/kit"}).state == Path("~/kit").expanduser()


def test_stacks_are_apart_from_one_another() -> None:
    home = Home(Path("/kit"), Path("/kit/cache"))
    one, two = home.stack("one"), home.stack("two")
    for part in ("root", "state_file", "secrets_dir", "run_dir", "logs_dir", "temp_dir"):
        assert getattr(one, part) != getattr(two, part)
    assert home.lock_file("one") != home.lock_file("two")
    assert not home.lock_file("one").is_relative_to(one.root), "the lock outlives the folder"


def test_socket_paths_stay_short_below_a_deep_home(tmp_path: Path) -> None:
    deep = Home(tmp_path / ("x" * 200), tmp_path).stack("a" * 40)
    assert len(deep.temp_dir.name) < 20
    assert not deep.temp_dir.is_relative_to(deep.root)


def test_stacks_are_those_with_state(tmp_path: Path) -> None:
    home = Home(tmp_path, tmp_path / "cache")
    assert home.stacks() == ()
    for name in ("b", "a"):
        home.stack(name).root.mkdir(parents=True)
        home.stack(name).state_file.touch()
    home.stack("failed").logs_dir.mkdir(parents=True)
    assert home.stacks() == ("a", "b")


def test_nobody_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may have no HOME, and a container's user no entry in /etc/passwd."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 47123)
    both = {"XDG_STATE_HOME": "/state", "XDG_CACHE_HOME": "/cache"}
    assert Home.from_environ(both).state == Path("/state/pdkit")
    with pytest.raises(ConfigError, match="HOME is not set") as caught:
        Home.from_environ({})
    assert caught.value.hint == "set HOME"
