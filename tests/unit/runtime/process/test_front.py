"""Who is believed to be the supervisor: whoever answers in a folder that is this user's alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.runtime.process.front import Holder, ask, is_there, listen, open_door


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The socket of a supervisor that answers, in a folder of this user alone."""
    folder = tmp_path / "f"
    folder.mkdir(mode=0o700)
    holder = Holder(open_door(folder / "s"), listen("127.0.0.1", 0))
    yield folder / "s"
    holder.close()


def test_a_supervisor_gives_its_process_and_the_routers_socket(path: Path) -> None:
    there = ask(path)
    assert there is not None
    assert there.pid == os.getpid()
    assert there.front is not None
    with there.front, socket.create_connection(there.front.getsockname()):
        assert is_there(path)


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710])
def test_a_socket_in_a_shared_folder_is_not_used(path: Path, mode: int) -> None:
    """Another user would name the process to end, and the socket to serve clients on."""
    path.parent.chmod(mode)
    assert ask(path) is None
    assert not is_there(path)


def test_a_socket_behind_a_link_is_not_used(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path.parent)
    assert ask(tmp_path / "link" / "s") is None


def test_a_socket_of_another_user_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: path.stat().st_uid + 1)
    assert ask(path) is None
