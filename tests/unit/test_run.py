"""What a run of scripts/test runs, in which order, and how it ends and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import run
from tests.conftest import REPO
from tests.run import EVERY_CHANGE, FULL, PARTS, Ended, Part, Run, files_of_now, machine, main

FILES = "a-hash"


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(run, "RESULTS", folder)
    monkeypatch.setattr(run, "files_of_now", lambda: FILES)
    return folder


def part(name: str, text: str, *, nice: bool = False) -> Part:
    return Part(name, (("sh", "-c", text),), nice=nice)


def whole_run(
    monkeypatch: pytest.MonkeyPatch, groups: list[list[Part]], *names: str, full: bool = False
) -> int:
    monkeypatch.setattr(run, "FULL" if full else "EVERY_CHANGE", groups)
    return main("5", *(("full",) if full else ()), *names)


def test_a_run_ends_with_times_and_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    monkeypatch.setattr(run, "machine", lambda: "a machine")
    assert whole_run(monkeypatch, [[part("a", "echo one; echo last")], [part("b", "true")]]) == 0
    printed = capsys.readouterr().out
    assert "\nlast\n" in printed and "one" not in printed, "the last line of what passed"
    install, a, b, whole, last = printed.splitlines()[-5:]
    assert [line.split()[0] for line in (install, a, b)] == ["install", "a", "b"]
    assert install.split()[1:] == ["5", "s,", "from", "0", "s"]
    assert whole.startswith("in all 5 s") and whole.endswith("; a machine")
    assert last == "all passed"
    assert (results / "a.log").read_text() == "one\nlast\n"


def test_a_failed_part_is_shown_whole_and_no_group_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    groups = [[part("a", "echo one; echo last; exit 3")], [part("b", "true")]]
    assert whole_run(monkeypatch, groups) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {"one", "last"} <= {*lines}
    assert lines[-1] == f"error: a failed; results: {results}"
    assert not (results / "b.log").exists()


def test_a_second_command_is_left_out_where_the_first_fails(tmp_path: Path) -> None:
    ran, ended = tmp_path / "ran", Run()
    ended.groups([[Part("a", (("false",), ("touch", str(ran))))]])
    assert ended.failed == ["a"] and not ran.exists()


def test_parts_of_a_group_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the other."""
    for name in "ab":
        os.mkfifo(tmp_path / name)
    one, other = (f"{tmp_path / name}" for name in "ab")
    ended = Run()
    ended.groups([[part("a", f"echo >{one}; cat {other}"), part("b", f"cat {one}; echo >{other}")]])
    assert sorted(found.name for found in ended.ended) == ["a", "b"] and not ended.failed


def test_nice_parts_run_beside_all_groups(tmp_path: Path, results: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    ended = Run()
    nice = part("a", f"nice; cat {tmp_path / 'gate'}", nice=True)
    ended.groups([[nice], [part("b", f"echo end >{tmp_path / 'gate'}")]])
    assert not ended.failed
    assert (results / "a.log").read_text() == f"{min(os.nice(0) + 15, 19)}\nend\n"


class TestFull:
    """A whole run goes on after a failure, and where an earlier one ended."""

    @pytest.fixture(autouse=True)
    def page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        page = tmp_path / "tested.md"
        page.write_text(f"before\n{run._BEGIN}old\n{run._END}after\n")
        monkeypatch.setattr(run, "TESTED", page)
        monkeypatch.setattr(run, "machine", lambda: "a machine")
        return page

    def test_what_passed_is_not_run_again(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: Path
    ) -> None:
        count = f"echo >>{tmp_path}/ran"
        broken = [[part("a", count)], [part("b", "false")], [part("c", count)]]
        assert whole_run(monkeypatch, broken, full=True) == 1
        assert "| b | failed | 0 s |" in page.read_text()
        repaired = [[part("a", "false")], [part("b", count)], [part("c", "false")]]
        assert whole_run(monkeypatch, repaired, full=True) == 0
        assert len((tmp_path / "ran").read_text().splitlines()) == 3
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        for name in "abc":
            assert f"| {name} | passed | 0 s |" in text
        assert "a machine" in text and "Commit " in text

    def test_everything_runs_again_with_other_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert whole_run(monkeypatch, [[part("a", "true")]], full=True) == 0
        monkeypatch.setattr(run, "files_of_now", lambda: "another hash")
        assert whole_run(monkeypatch, [[part("a", "false")]], full=True) == 1

    @pytest.mark.parametrize("files", ["", FILES])
    def test_a_run_of_every_change_skips_nothing(
        self, monkeypatch: pytest.MonkeyPatch, files: str
    ) -> None:
        monkeypatch.setattr(run, "files_of_now", lambda: files)
        assert whole_run(monkeypatch, [[part("a", "true")]]) == 0
        assert whole_run(monkeypatch, [[part("a", "false")]]) == 1
        assert whole_run(monkeypatch, [[part("a", "false")]], full=True) == int(not files)


def test_parts_run_that_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "docs", part("docs", "echo built"))
    assert main("0", "docs") == 0
    assert "built" in capsys.readouterr().out
    assert main("0", "dogs", "quick") == 3
    assert "no such part: dogs, quick" in capsys.readouterr().err


def test_named_parts_keep_their_groups() -> None:
    groups = run._chosen({"unit", "connector", "processes", "containers", "versions"})
    names = [[found.name for found in group] for group in groups if group]
    assert names == [["unit"], ["connector"], ["processes", "containers"], ["versions"]]


def test_every_folder_and_file_of_tests_is_in_a_full_run() -> None:
    commands = " ".join(
        word for group in FULL for found in group for line in found.commands for word in line
    )
    for path in (REPO / "tests").rglob("test_*.py"):
        where = path.relative_to(REPO)
        on_hosts = where.parts[:2] in (("tests", "unit"), ("tests", "hosts"))
        assert on_hosts or any(str(up) in commands.split() for up in (where, *where.parents)), path
    assert {"host-small", "host-large"} <= PARTS.keys()
    names = [found.name for group in FULL for found in group]
    assert len(names) == len({*names})
    everywhere = {found.name for group in EVERY_CHANGE for found in group} - {*names}
    assert everywhere == {"unit", "processes", "containers"}, "parts of those of a full run"


class TestFiles:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        (tmp_path / ".gitignore").write_text("ignored\n")
        (tmp_path / "one.py").write_text("1")
        for command in (("init", "-q"), ("add", ".")):
            subprocess.run(("git", *command), cwd=tmp_path, check=True)
        return tmp_path

    @pytest.mark.parametrize("name", ["one.py", "new.py"])
    def test_a_change_shows(self, checkout: Path, name: str) -> None:
        before = files_of_now(checkout)
        (checkout / name).write_text("2")
        assert files_of_now(checkout) != before
        (checkout / name).unlink()
        assert (files_of_now(checkout) == before) is (name == "new.py")

    @pytest.mark.parametrize("name", ["ignored", "docs/results/tested.md"])
    def test_results_do_not_show(self, checkout: Path, name: str) -> None:
        before = files_of_now(checkout)
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("2")
        assert files_of_now(checkout) == before

    def test_nothing_is_recorded_without_git(self, tmp_path: Path, results: Path) -> None:
        assert files_of_now(tmp_path) == ""
        Run(files="").groups([[part("a", "true")]])
        assert not (results / "passed.json").exists()


def test_a_stopped_run_leaves_no_process(tmp_path: Path, results: Path) -> None:
    """Its parts are interrupted, as by Ctrl-C, and it waits for their ends."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"""
from pathlib import Path
from tests import run
from tests.run import Part
run.RESULTS = Path({str(results)!r})
run.EVERY_CHANGE = [[Part("a", (("sh", "-c", "exec 3>{fifo}; sleep 600; true"),))], [Part("b", ())]]
raise SystemExit(run.main("0"))
"""
    process = subprocess.Popen((sys.executable, "-c", code), stdout=subprocess.PIPE, text=True)
    with fifo.open("rb") as reader:
        process.send_signal(signal.SIGTERM)
        assert reader.read() == b"", "who holds the pipe open lives"
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "\nerror: stopped before its end" in printed
    assert "== b" not in printed


def test_two_parts_that_end_together_are_both_recorded(results: Path) -> None:
    names = [str(number) for number in range(20)]
    ends = [
        threading.Thread(target=run.record_passed, args=(FILES, Ended(name, 0, 1, 0)))
        for name in names
    ]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert run.parts_passed(FILES) == dict.fromkeys(names, 1)


@pytest.mark.parametrize(
    ("flags", "named"),
    [("sse2", "no AVX2"), ("avx2", "AVX2"), ("avx2 avx512f amx_tile", "AVX2 AVX-512 AMX")],
)
def test_the_machine_is_described(tmp_path: Path, flags: str, named: str) -> None:
    for name, text in (
        ("proc/cpuinfo", f"processor : 0\nmodel name\t: Some EPYC\nflags\t\t: {flags}\n"),
        ("proc/loadavg", "1.50 2.00 3.00 1/2 3\n"),
        ("etc/debian_version", "12.9\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    described = machine(tmp_path)
    assert described.startswith(f"Some EPYC, {named}, ")
    assert "load 1.50 2.00 3.00, " in described and "Debian 12.9, " in described
