"""Anything may lie in place of a stack's files: no command hangs or ends in a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.runtime.home import Home
from deploy.runtime.state import ServiceRecord, boot_id
from deploy.workflows.saved_state import following, new_state, write_state
from tests.conftest import Ended
from tests.ports import free_row

pytestmark = pytest.mark.timeout(60)  # a reader of a FIFO would wait forever

NOBODY = ServiceRecord("redis", 4194303, 1.0)
LINES = '{"at": "2026-01-01T00:00:00+00:00", "service": "redis", "kind": "died", "text": "one"}\n'


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def deep_inside(path: Path) -> None:
    """As damage that leaves the rest whole: in the spec, or in a line."""
    if path.name == "state.json":
        text = path.read_text()
        assert '"spec": {' in text
        path.write_text(text.replace('"spec": {', '"spec": {"x":' + "[" * 500 + "]" * 500 + ","))
    else:
        path.write_text('{"at": ' + '{"a": ' * 100_000)


def binary(path: Path) -> None:
    path.write_bytes(b"\x00\xff\xfe\x1b[2J\n" * 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def number(path: Path) -> None:
    path.write_text("5\n")


def endless(path: Path) -> None:
    os.truncate(path, 1 << 33)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def door(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)  # whose path may have 107 bytes


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_folder(path: Path) -> None:
    folder(path)
    (path / "file").touch()


DAMAGES = [
    deep, deep_inside, binary, empty, number, endless, pipe, link_to_pipe, device, loop, door,
    folder, full_folder,
]  # fmt: skip


@pytest.fixture
def saved(prepared: Callable[..., Any], tmp_path: Path) -> Home:
    """A stack of which nothing runs, with each of its files."""
    home = Home(tmp_path / "home", tmp_path / "home" / "cache")
    files, port = home.stack("pdkit"), free_row()
    state = new_state(prepared(port=port), "up", boot=boot_id()).with_service(NOBODY)
    before = new_state(prepared(port=port, topology="1p2d"), "up", boot=boot_id())
    write_state(files.state_file, following(before, state))
    for name in prepared().stack.secrets:
        path = files.secrets_dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("secret\n")
    files.drain_file.parent.mkdir(parents=True)
    files.drain_file.write_text("consumer-0 restart:1\n")
    files.drain_file.with_suffix(".lock").touch()
    files.events_file.write_text(LINES)
    files.logs_dir.mkdir()
    (files.logs_dir / "redis.log").write_text("a line\n")
    home.lock_file("pdkit").parent.mkdir()
    home.lock_file("pdkit").touch()
    home.lock_file("pdkit").with_suffix(".turn").touch()
    return home


@pytest.fixture
def run(saved: Home, deploy_here: Callable[..., Ended], tmp_path: Path) -> Callable[..., Ended]:
    """Run a command on that stack; no traceback may come of it, and an error has a hint."""

    def ran(*words: str) -> Ended:
        ended = deploy_here(*words, cwd=tmp_path, home=saved.state)
        assert "Traceback" not in ended.stdout + ended.stderr
        assert not any(ord(c) < 32 and c != "\n" for c in ended.stdout + ended.stderr)
        assert 0 <= ended.code <= 4
        if ended.code and "--json" not in words:
            assert len([one for one in ended.stderr.splitlines() if one.startswith("error")]) == 1
            assert "\ntry: " in ended.stderr
        return ended

    return ran


def gone(home: Home) -> bool:
    return not os.path.lexists(home.stack("pdkit").root)


@pytest.mark.parametrize(
    "words",
    [
        ("check",), ("restart",), ("drain", "consumer-0"), ("rollback",), ("up", "--resume"),
        ("status", "--json"), ("logs",),
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("damage", [deep, deep_inside, binary, pipe, device])
def test_each_command_names_a_damaged_state(
    saved: Home, run: Callable[..., Ended], damage: Any, words: tuple[str, ...]
) -> None:
    file = saved.stack("pdkit").state_file
    damage(file)
    ended = run(*words)
    if words == ("logs",):
        assert (ended.code, ended.stdout) == (0, "a line\n"), "logs are files of their own"
    else:
        assert ended.code == 2
        assert str(file) in ended.stdout + ended.stderr
        assert "deploy down --name pdkit" in ended.stdout + ended.stderr


@pytest.mark.parametrize("damage", DAMAGES)
class TestStatus:
    def test_names_a_damaged_state(
        self, saved: Home, run: Callable[..., Ended], damage: Any
    ) -> None:
        damage(saved.stack("pdkit").state_file)
        ended = run("status")
        assert ended.code == 2
        assert "deploy down --name pdkit" in ended.stderr

    def test_names_a_damaged_secret(
        self, saved: Home, run: Callable[..., Ended], damage: Any
    ) -> None:
        file = next(saved.stack("pdkit").secrets_dir.iterdir())
        damage(file)
        ended = run("status")
        if damage in (empty, number, deep, deep_inside):
            assert ended.code == 4, "it is text; an empty one is made at the next start"
            return
        assert (ended.code, str(file) in ended.stderr) == (2, True)
        assert "deploy down" in ended.stderr

    def test_does_without_events_that_are_damaged(
        self, saved: Home, run: Callable[..., Ended], damage: Any
    ) -> None:
        damage(saved.stack("pdkit").events_file)
        assert run("status").code == 4, "nothing of it runs"
        assert run("status", "--json").code == 4

    def test_names_a_damaged_list_of_drained_engines(
        self, saved: Home, run: Callable[..., Ended], damage: Any
    ) -> None:
        file = saved.stack("pdkit").drain_file
        damage(file)
        ended = run("status")
        if damage in (empty, number, deep, deep_inside):
            assert ended.code == 4, "names of engines that do not exist"
        else:
            assert (ended.code, f"rm -r {file}" in ended.stderr) == (2, True)
        file.with_suffix(".lock").unlink(missing_ok=True)

    def test_does_without_the_lock_of_drains(
        self, saved: Home, run: Callable[..., Ended], damage: Any
    ) -> None:
        damage(saved.stack("pdkit").drain_file.with_suffix(".lock"))
        assert run("status").code == 4

    def test_logs_leaves_out_what_is_no_log(
        self, saved: Home, run: Callable[..., Ended], damage: Any
    ) -> None:
        damage(saved.stack("pdkit").logs_dir / "redis.log")
        run("logs")


class TestDown:
    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize(
        "file", ["state", "secret", "events", "drains", "lock", "turn", "log", "supervisor"]
    )
    def test_removes_a_stack_whatever_its_files_are(
        self, saved: Home, run: Callable[..., Ended], damage: Any, file: str
    ) -> None:
        files = saved.stack("pdkit")
        path = {
            "state": files.state_file,
            "secret": next(files.secrets_dir.iterdir()),
            "events": files.events_file,
            "drains": files.drain_file,
            "lock": saved.lock_file("pdkit"),
            "turn": saved.lock_file("pdkit").with_suffix(".turn"),
            "log": files.logs_dir / "redis.log",
            "supervisor": files.supervisor_socket,
        }[file]
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch()
        damage(path)
        ended = run("down")
        if path.parent == saved.lock_file("pdkit").parent and damage is full_folder:
            assert ended.code == 3
            assert f"rm -r {path}" in ended.stderr
            return
        assert ended.code == 0
        assert gone(saved)
        assert run("status").code == 0

    def test_removes_a_secret_with_the_users_url_that_cannot_be_read(
        self, saved: Home, run: Callable[..., Ended]
    ) -> None:
        (saved.stack("pdkit").secrets_dir / "redis_url").write_bytes(b"\xff")
        ended = run("down")
        assert ended.code == 0
        assert "are not looked for" in ended.stderr
        assert gone(saved)

    def test_a_file_in_place_of_its_folder(self, saved: Home, run: Callable[..., Ended]) -> None:
        root = saved.stack("pdkit").root
        root.rename(root.with_name("moved"))
        root.touch()
        assert run("down").code == 0
        assert gone(saved)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where every value is, folders of values included."""
    yield path
    if not isinstance(value, (dict, list)):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(inner, (*path, key))


WRONG = [None, 1e999, "text", [[]]]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_no_value_of_a_wrong_type_ends_in_a_traceback(
    saved: Home, run: Callable[..., Ended], wrong: object
) -> None:
    file = saved.stack("pdkit").state_file
    whole, bad = json.loads(file.read_text()), {}
    for path in leaves(whole):
        if not path or path[0] == "history":
            continue
        values = json.loads(json.dumps(whole))
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = wrong
        file.write_text(json.dumps(values))
        try:
            run("status")
        except AssertionError as exc:
            bad[path] = str(exc)[-600:]
    assert not bad, list(bad)
