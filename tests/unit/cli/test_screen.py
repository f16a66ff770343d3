"""The live screen, on a terminal that the test holds the other end of."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli.watching import Screen
from tests.conftest import plain_environ

ENTER, LEAVE, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
PROGRAM = """
import sys
from deploy.cli.watching import Screen
from deploy.runtime.interrupts import interrupt_once
interrupt_once()
try:
    with Screen() as screen:
        for number in range(int(sys.argv[1])):
            view = "\\n".join(f"line {n} of {number}, " + 50 * "-" for n in range(9))
            screen.show(lambda rows: view)
            screen.wait(60 if number else 0)
except KeyboardInterrupt:
    pass
print("after")
"""


class Terminal:
    """A program on a terminal, and what it wrote."""

    def __init__(self, *arguments: str, term: str = "xterm", rows: int = 24) -> None:
        self._fd, slave = pty.openpty()
        self.resize(rows, 80)
        self.process = subprocess.Popen(
            (sys.executable, "-c", PROGRAM, *arguments),
            env={**plain_environ(), "TERM": term, "COLUMNS": "7"},
            stdout=slave,
            stderr=slave,
            stdin=slave,
        )
        os.close(slave)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, words: str, *, after: int = 0) -> None:
        deadline = time.monotonic() + 20
        while words not in self.text[after:]:
            assert time.monotonic() < deadline, self.text
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._fd, 65536).decode().replace("\r\n", "\n")
                except OSError:  # nobody has the other end any more
                    assert words in self.text[after:], self.text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[type[Terminal]]:
    made: list[Terminal] = []

    class Kept(Terminal):
        def __init__(self, *arguments: str, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            made.append(self)

    yield Kept
    for one in made:
        one.close()


def test_the_screen_is_drawn_in_place_and_restored(terminal: type[Terminal]) -> None:
    one = terminal("1")
    one.read_until("after")
    live, _, rest = one.text.partition(LEAVE)
    assert live.startswith(ENTER)
    assert SHOW_CURSOR in live
    assert "line 8 of 0" in live
    assert rest.startswith("line 0 of 0"), "the last view stays to be read"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_restores_the_screen(terminal: type[Terminal], number: int) -> None:
    one = terminal("2")
    one.read_until("line 8 of 1")
    assert LEAVE not in one.text
    one.process.send_signal(number)
    one.read_until("after")
    assert one.text.count(ENTER) == one.text.count(LEAVE) == one.text.count(SHOW_CURSOR) == 1
    assert one.process.wait(10) == 0


def test_a_resize_draws_again(terminal: type[Terminal]) -> None:
    one = terminal("2", rows=24)
    one.read_until("line 8 of 1")
    seen = len(one.text)
    one.resize(4, 30)
    one.read_until("line 3 of 1", after=seen)
    again = one.text[seen:]
    assert "line 4 of 1" not in again, "there is no room for it"
    assert "line 0 of 1, " + 17 * "-" + "\x1b[K" in again, "cut at 30, whatever COLUMNS says"


def test_a_dumb_terminal_gets_plain_text(terminal: type[Terminal]) -> None:
    one = terminal("1", term="dumb")
    one.read_until("after")
    assert "\x1b" not in one.text


def test_output_to_a_pipe_is_plain_text(tmp_path: Path) -> None:
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, "1"),
        env={**plain_environ(), "TERM": "xterm"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("line 0 of 0")
    assert "\x1b" not in done.stdout


HOSTILE = "said \x1b]52;c;aGk=\x07\x9b2J\x1b[2Jthis"


def test_control_characters_in_a_view_are_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A view quotes servers and logs."""
    with Screen() as screen:
        screen.show(lambda _: HOSTILE)
    shown = capsys.readouterr().out
    assert "this" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_control_characters_are_removed_when_drawn_in_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(Screen, "_size", lambda _: os.terminal_size((200, 24)))
    with Screen() as screen:
        screen.show(lambda _: HOSTILE)
    shown = capsys.readouterr().out
    assert shown.count("this") == 2, "in place, and below when it is left"
    assert not {"\x1b]", "\x07", "\x9b", "\x1b[2J"} & {
        part for part in ("\x1b]", "\x07", "\x9b", "\x1b[2J") if part in shown
    }
