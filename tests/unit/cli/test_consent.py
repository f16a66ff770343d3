"""A deploy.yaml of the current folder that names programs or addresses must be named first."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.config.sources import REACHING, load_spec
from deploy.config.spec import StackSpec
from deploy.runtime import consent
from deploy.runtime.home import Home
from tests.conftest import Ended, plain_environ

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
    assert "try: deploy down --volumes -f deploy.yaml, which" in refused.stderr
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


SETTLED = ("--vendor", "cpu", "--runtime", "process", "--model", "tiny")
QUESTION = "[y/N] "
ON_TERMINAL = """
import fcntl, sys, termios
from deploy.cli.main import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main())
"""
EOF = "\x04"


class Terminal:
    """Commands in a folder, typed on a terminal."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        self.file = folder / "deploy.yaml"

    def run(self, *options: str, answer: str = "", piped: bool = False, **environ: str) -> Ended:
        """Run `deploy plan`; answer once it asks. What the terminal showed counts as stderr.

        Its stdout is another terminal, or a pipe if it is `piped`.
        """
        ours, its = pty.openpty()
        reads, writes = os.pipe() if piped else pty.openpty()
        argv = (sys.executable, "-c", ON_TERMINAL, "plan", *SETTLED, *options)
        with subprocess.Popen(
            argv,
            cwd=self.folder,
            env=plain_environ(PDKIT_HOME=str(self.home), **environ),
            stdin=its,
            stdout=writes,
            stderr=its,
            start_new_session=True,
        ) as process:
            os.close(its)
            os.close(writes)
            try:
                shown, stdout = self._talk(ours, reads, answer)
            except BaseException:
                process.kill()
                raise
        os.close(ours)
        os.close(reads)
        return Ended(process.returncode, stdout, shown)

    @staticmethod
    def _talk(terminal: int, output: int, answer: str) -> tuple[str, str]:
        """Return what came on the terminal and on stdout until the process ended."""
        came, deadline = {terminal: "", output: ""}, time.monotonic() + 30
        going_on = set(came)
        while going_on:
            assert time.monotonic() < deadline, came
            for source in select.select(going_on, [], [], 1)[0]:
                try:
                    read = os.read(source, 65536)
                except OSError:  # the end of a terminal
                    read = b""
                came[source] += read.decode().replace("\r\n", "\n")
                if not read:
                    going_on.remove(source)
            if answer and came[terminal].endswith(QUESTION):
                os.write(terminal, answer.encode())
                answer = ""
        return came[terminal], came[output]


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    """A terminal in a folder that has a deploy.yaml to ask about."""
    folder = tmp_path / "stack"
    folder.mkdir()
    made = Terminal(folder, tmp_path / "home")
    made.file.write_text("engine: {python: ./engines/bin/python}\n")
    return made


class TestOnATerminal:
    def test_a_yes_is_remembered_until_the_content_changes(self, terminal: Terminal) -> None:
        asked = terminal.run(answer="y\n")
        assert asked.code == 0 and asked.stdout
        assert "engine.python  engines/bin/python\n" in asked.stderr
        again = terminal.run()
        assert (again.code, QUESTION in again.stderr) == (0, False)
        text = terminal.file.read_text()
        terminal.file.write_text("engine: {python: ./evil}\n")
        changed = terminal.run(answer="n\n")
        assert changed.code == 2 and "engine.python  evil\n" in changed.stderr
        terminal.file.write_text(text)
        assert terminal.run().code == 0, "this content has been allowed"

    @pytest.mark.parametrize("answer", ["\n", EOF, "yesterday\n", "\xff\n"])
    def test_anything_but_yes_is_a_no_and_is_not_remembered(
        self, terminal: Terminal, answer: str
    ) -> None:
        refused = terminal.run(answer=answer)
        assert (refused.code, refused.stdout) == (2, "")
        assert "error: deploy.yaml sets engine.python" in refused.stderr
        assert "-f deploy.yaml" in refused.stderr
        assert not terminal.home.exists()

    def test_the_same_content_elsewhere_is_asked_about(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        """Its relative paths name other programs there, and so they do behind a link."""
        assert terminal.run(answer="y\n").code == 0
        for name in ("copied", "linked"):
            other = Terminal(tmp_path / name, terminal.home)
            other.folder.mkdir()
            if name == "copied":
                other.file.write_text(terminal.file.read_text())
            else:
                other.file.symlink_to(terminal.file)
            assert other.run(answer="n\n").code == 2, name
        terminal.folder.rename(tmp_path / "moved")
        assert Terminal(tmp_path / "moved", terminal.home).run(answer="n\n").code == 2

    @pytest.mark.parametrize("way", [("--json",), ("CI",), ("pager",), ("piped",)])
    def test_nobody_is_asked_who_may_not_answer(
        self, terminal: Terminal, deploy: Callable[..., Ended], way: tuple[str, ...]
    ) -> None:
        if way == ("piped",):
            ended = deploy("plan", *SETTLED, cwd=terminal.folder, home=terminal.home)
        elif way == ("CI",):
            ended = terminal.run(CI="true")
        elif way == ("pager",):
            ended = terminal.run(piped=True)
        else:
            ended = terminal.run(*way)
        assert (ended.code, QUESTION in ended.stderr) == (2, False)
        assert "-f deploy.yaml, which remembers" in ended.stdout + ended.stderr

    def test_the_hint_works_and_remembers(
        self, terminal: Terminal, deploy: Callable[..., Ended]
    ) -> None:
        refused = deploy("plan", *SETTLED, cwd=terminal.folder, home=terminal.home)
        command = refused.stderr.partition("try: deploy ")[2].partition(",")[0].split()
        for typed in (command, command[: command.index("-f")]):
            assert deploy(*typed, cwd=terminal.folder, home=terminal.home).code == 0

    def test_a_secret_and_the_signs_of_a_terminal_are_not_shown(self, terminal: Terminal) -> None:
        terminal.file.write_text(
            "engine:\n"
            '  env: {HF_TOKEN: hf_abc, HTTPS_PROXY: "http://me:pass@proxy:1",'
            ' X: "a\\e[2K\\u202eb"}\n'
        )
        shown = terminal.run(answer="n\n").stderr
        assert "hf_abc" not in shown and "me:pass" not in shown
        assert "engine.env.HTTPS_PROXY  http://***@proxy:1\n" in shown
        assert "engine.env.X            'a\\x1b[2K\\u202eb'\n" in shown

    def test_what_is_too_long_to_be_read_is_not_asked(self, terminal: Terminal) -> None:
        args = ", ".join(f"--flag-{n}" for n in range(2000))
        terminal.file.write_text(f"engine: {{args: [{args}, --evil]}}\n")
        refused = terminal.run()
        assert (refused.code, QUESTION in refused.stderr) == (2, False)
        assert len(refused.stderr) < 2000

    def test_a_home_that_cannot_be_written_asks_each_time(self, terminal: Terminal) -> None:
        terminal.home.write_text("a file")
        for _ in range(2):
            asked = terminal.run(answer="yes\n")
            assert QUESTION in asked.stderr
            assert "the answer was not saved" in asked.stderr


class TestMemory:
    """What the state folder has counts only if this user's kit wrote it."""

    CONTENT = b"engine: {python: ./evil}\n"

    @pytest.fixture
    def home(self, tmp_path: Path) -> Home:
        return Home(tmp_path / "home", tmp_path / "cache")

    @pytest.fixture
    def note(self, home: Home, tmp_path: Path) -> Path:
        """The note of ./deploy.yaml, which is known."""
        assert consent.remember(home, tmp_path / "deploy.yaml", self.CONTENT)
        assert self.known(home, tmp_path)
        (note,) = (home.state / "named-files").iterdir()
        return note

    def known(self, home: Home, folder: Path) -> bool:
        return consent.is_known(home, folder / "deploy.yaml", self.CONTENT)

    def test_only_its_owner_can_read_it(self, note: Path) -> None:
        assert (note.stat().st_mode & 0o777, note.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    @pytest.mark.parametrize("damage", ["", "x", "\0", "\xff" * 70_000])
    def test_a_damaged_note_is_no_consent(
        self, note: Path, home: Home, tmp_path: Path, damage: str
    ) -> None:
        note.write_text(damage, encoding="latin-1")
        assert not self.known(home, tmp_path)
        assert consent.remember(home, tmp_path / "deploy.yaml", self.CONTENT)
        assert self.known(home, tmp_path)

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
    def test_what_others_can_reach_is_no_consent(
        self, note: Path, home: Home, tmp_path: Path, mode: int
    ) -> None:
        note.chmod(mode)
        assert not self.known(home, tmp_path)

    def test_what_another_user_wrote_is_no_consent(
        self, note: Path, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner = note.stat().st_uid
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        assert not self.known(home, tmp_path)

    @pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "folder"])
    def test_what_is_no_file_of_the_kit_is_no_consent(
        self, note: Path, home: Home, tmp_path: Path, kind: str
    ) -> None:
        aside = note.rename(tmp_path / "aside")
        if kind == "link":
            note.symlink_to(aside)
        elif kind == "hard link":
            note.hardlink_to(aside)
        elif kind == "fifo":
            os.mkfifo(note)
        else:
            note.mkdir()
        assert not self.known(home, tmp_path)

    def test_a_file_in_the_place_of_the_folder_is_no_consent(
        self, home: Home, tmp_path: Path
    ) -> None:
        home.state.mkdir()
        (home.state / "named-files").write_text("")
        assert not self.known(home, tmp_path)
        assert not consent.remember(home, tmp_path / "deploy.yaml", self.CONTENT)

    def test_what_was_read_is_remembered_and_not_what_lies_there_later(
        self, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        file = Path("deploy.yaml")
        file.write_text("engine: {python: ./good}\n")
        source = load_spec({}, {})
        file.write_bytes(self.CONTENT)  # between reading and remembering
        assert source.file and source.content
        consent.remember(home, source.file, source.content)
        assert not self.known(home, tmp_path)
        assert str(source.spec.engine.python) == "good"


def test_every_setting_is_classified() -> None:
    """Who adds a setting says whether a file of some folder may set it."""
    harmless = {
        "name", "vendor", "runtime", "gpus", "topology", "producers", "consumers", "tp",
        "allow_untested", "gpu_access", "connector", "layerwise",
        "save_decode_cache", "model", "port", "supervise",
        "engine.dtype", "engine.block_size", "engine.max_model_len",
        "engine.kv_cache_gib", "engine.gpu_memory", "engine.memory_gib", "lmcache.chunk_size",
        "lmcache.staging_gib", "lmcache.server_gib", "redis.client", "redis.integrity",
        "redis.memory_gib", "redis.shards",
        "router.degrade", "router.max_body_mib", "slo.ttft_s", "slo.itl_s", "timeouts.ready_s",
        "timeouts.stop_s", "timeouts.hung_s", "timeouts.stuck_s",
    }  # fmt: skip
    known = set()
    for name, field in StackSpec.model_fields.items():
        parts = getattr(field.annotation, "model_fields", None)
        known |= {f"{name}.{part}" for part in parts} if parts else {name}
    assert known == harmless | set(REACHING)
    assert not harmless & set(REACHING)
