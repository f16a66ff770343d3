"""The comparison itself: what counts as broken, and that nothing is lost on the way."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.versions.upstream import explanations, report, sdist
from tests.versions.upstream.report import Change, Compared, as_markdown
from tests.versions.upstream.side import End, Run, Side

TEST = "tests/test_a.py::test_one"
GOOD, BAD = Side({TEST: End("passed")}), Side({TEST: End("failed", "KeyError: 1")})
BROKEN = Change.of(TEST, End("passed"), End("failed", "KeyError: 1"))


def test_passed_then_failed_is_bad_and_told_with_its_reason() -> None:
    assert BROKEN.bad
    told = as_markdown([Compared("1.0", ["tests/test_a.py"], GOOD, BAD, [BROKEN])], ["Its note."])
    assert f"| 1.0 | `{TEST}` | passed → failed | **not explained**: KeyError: 1 |" in told
    assert "| 1.0 | 1 | 1 | 0 | 0 | 0 | 1 | 0 | 1 |" in told


@pytest.mark.parametrize("after", [End("skipped"), End("hung"), End("not run"), None])
def test_a_test_that_no_longer_runs_is_bad_too(after: End | None) -> None:
    assert Change.of(TEST, End("passed"), after).bad


def test_failed_then_passed_is_not_bad() -> None:
    assert not Change.of(TEST, End("failed"), End("passed")).bad


def test_a_change_that_does_not_repeat_is_unstable() -> None:
    assert BROKEN.repeated([(GOOD, BAD), (GOOD, BAD)]).bad
    assert not BROKEN.repeated([(GOOD, BAD), (GOOD, GOOD)]).stable
    assert not BROKEN.repeated([(BAD, BAD)]).bad


def test_an_explanation_is_for_the_release_and_the_failure_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(explanations.EXPLANATIONS, r"^1\.0 .*::test_one KeyError", "its reason")
    assert not BROKEN.explained("1.0").bad
    assert BROKEN.explained("2.0").bad
    assert replace(BROKEN, why="TypeError: 1").explained("1.0").bad
    assert "its reason" in report.as_markdown(
        [Compared("1.0", [], GOOD, BAD, [BROKEN])], ["Its note."]
    )


def test_kept_outcomes_come_back_as_they_were() -> None:
    side = replace(BAD, fixes={"B1": "applied"})
    assert Side.from_dict(side.as_dict()) == side


def test_behind_a_file_that_kills_its_process_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [
        '{"lmcache": "/release/lmcache/__init__.py"}\n'
        '{"collected": ["a.py::test_x", "a.py::test_y", "a.py::test_z", "b.py::test_x"]}\n'
        '{"started": "a.py::test_x"}\n'
        '{"test": "a.py::test_x", "outcome": "passed", "why": ""}\n'
        '{"started": "a.py::test_y"}\n',
        '{"lmcache": "/release/lmcache/__init__.py"}\n'
        '{"collected": ["b.py::test_x"]}\n'
        '{"started": "b.py::test_x"}\n'
        '{"test": "b.py::test_x", "outcome": "passed", "why": ""}\n'
        '{"test": "b.py::test_x", "outcome": "failed", "why": "at its end"}\n',
    ]

    def pytest_stand_in(_run: Run, _targets: list[str], log: Path) -> tuple[str, str]:
        log.write_text(logs.pop(0), encoding="utf-8")
        return "", "hung" if logs else ""

    monkeypatch.setattr(Run, "_pytest", pytest_stand_in)
    monkeypatch.setattr("tests.versions.upstream.side.installed", lambda _: Path("/release"))
    ends = Run("1.0", tmp_path, None, 1).tests(["a.py", "b.py"]).ends
    assert {test: end.outcome for test, end in ends.items()} == {
        "a.py::test_x": "passed",
        "a.py::test_y": "hung",
        "a.py::test_z": "not run",
        "b.py::test_x": "failed",
    }


def archive(folder: Path, *names: str) -> Path:
    path = folder / "lmcache-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name in names:
            packed.addfile(tarfile.TarInfo(f"lmcache-1.0/{name}"), io.BytesIO())
    return path


def test_only_tests_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lmcache/__init__.py", "tests/v1/test_a.py", "pytest.ini", "setup.py")
    monkeypatch.setattr(sdist, "_download", lambda _, folder: archive(folder, *names))
    sdist.unpack_tests("1.0", tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"tests/v1/test_a.py", "pytest.ini"}


def test_an_sdist_without_tests_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdist, "_download", lambda _, folder: archive(folder, "setup.py"))
    with pytest.raises(sdist.NoTests, match="no tests"):
        sdist.unpack_tests("1.0", tmp_path)
