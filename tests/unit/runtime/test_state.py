"""The state file: written in one step, private, and read with suspicion."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import StateError
from deploy.runtime.home import write_private
from deploy.runtime.state import (
    FORMAT,
    ServiceRecord,
    boot_id,
    read_state_file,
    write_state_file,
)

RECORD = ServiceRecord("redis", 4711, 1700000000.25, "/logs/redis.log", 2)
VALUES: dict[str, Any] = {
    "name": "demo",
    "spec": {"timeouts": {"stop_s": 5}, "redis": {"client": "valkey"}},
    "machine": {"runtime": "process"},
    "boot": boot_id(),
    "services": {"redis": asdict(RECORD)},
}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stacks" / "demo" / "state.json"


def test_state_is_read_as_it_was_written(file: Path) -> None:
    write_state_file(file, VALUES)
    read = read_state_file(file, "demo")
    assert read is not None
    assert (read.name, read.boot, read.runtime) == ("demo", boot_id(), "process")
    assert (read.stop_s, read.redis_client) == (5.0, "valkey")
    assert read.services == {"redis": RECORD}
    assert read.values == {"format": FORMAT, **VALUES}


def test_processes_of_another_boot_are_not_ours(file: Path) -> None:
    """Their pids are others' now."""
    write_state_file(file, {**VALUES, "boot": "another"})
    read = read_state_file(file, "demo")
    assert read is not None
    assert read.services == {}


def test_containers_outlive_a_boot(file: Path) -> None:
    write_state_file(file, {**VALUES, "boot": ""})
    read = read_state_file(file, "demo")
    assert read is not None
    assert read.services == {"redis": RECORD}


def test_a_missing_file_is_no_state(file: Path) -> None:
    assert read_state_file(file, "demo") is None


def test_only_the_owner_can_read_state_whatever_the_umask(file: Path) -> None:
    old = os.umask(0)
    try:
        write_state_file(file, VALUES)
    finally:
        os.umask(old)
    assert mode(file) == 0o600
    assert mode(file.parent) == 0o700


def test_nothing_but_the_state_is_left(file: Path) -> None:
    for _ in range(3):
        write_state_file(file, VALUES)
    assert [path.name for path in file.parent.iterdir()] == ["state.json"]


def test_a_crash_while_writing_leaves_the_old_state(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state_file(file, VALUES)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_state_file(file, {**VALUES, "fingerprint": "other"})
    read = read_state_file(file, "demo")
    assert read is not None
    assert "fingerprint" not in read.values
    assert read.services == {"redis": RECORD}


def test_a_left_over_of_a_crash_is_overwritten(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.with_suffix(".tmp").write_text("half a sta")
    write_state_file(file, VALUES)
    read = read_state_file(file, "demo")
    assert read is not None
    assert "fingerprint" not in read.values
    assert read.services == {"redis": RECORD}
    assert not file.with_suffix(".tmp").exists()


def written(**changes: Any) -> str:
    document = {
        "format": FORMAT, "name": "demo", "spec": {}, "machine": {}, "boot": "", "services": {},
    }  # fmt: skip
    return json.dumps({**document, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "5",
        '"text"',
        "{}",
        written()[:-10],
        written(services=None),
        written(services=[1]),
        written(services={"redis": {}}),
        written(services={"redis": {"pid": "x", "start_time": 1, "log": ""}}),
        written(services={"redis": None}),
        written(services={"redis": {**asdict(RECORD), "pid": -1}}),
        written(services={"redis": {**asdict(RECORD), "start_time": 0}}),
        written(services={"redis": {**asdict(RECORD), "start_time": 1e999}}),
        written(services={"redis": {**asdict(RECORD), "pid": 1e999}}),
        written(name="another"),
        "[" * 100_000,
        written(spec=None),
        written(spec=5),
        written(machine="none"),
        written(spec={"timeouts": {"stop_s": "soon"}}),
        written(spec={"redis": 5}),
        written(format=None),
        written(format="new"),
    ],
)
def test_a_broken_file_says_which_and_how_to_go_on(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(StateError, match="broken") as caught:
        read_state_file(file, "demo")
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message
    assert "deploy down --name demo" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_text(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(StateError):
        read_state_file(file, "demo")


def test_a_folder_in_its_place(file: Path) -> None:
    file.mkdir(parents=True)
    with pytest.raises(StateError):
        read_state_file(file, "demo")


def test_a_newer_format_is_not_called_broken(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(written(format=FORMAT + 1))
    with pytest.raises(StateError, match="newer pdkit") as caught:
        read_state_file(file, "demo")
    assert "broken" not in caught.value.message


def test_unknown_keys_of_a_later_version_are_ignored(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(written(more=1))
    read = read_state_file(file, "demo")
    assert read is not None
    assert (read.runtime, read.stop_s, read.redis_client) == ("", None, "")


def test_a_private_file_replaces_one_that_others_could_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    path.parent.mkdir()
    path.write_text("old")
    path.chmod(0o666)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert mode(path) == 0o600


def test_a_private_file_does_not_follow_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "link").symlink_to(target)
    write_private(tmp_path / "link", "new")
    assert target.read_text() == "precious"
    assert not (tmp_path / "link").is_symlink()
