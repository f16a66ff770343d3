"""What is said of the fixes: by a stack's engines, by `deploy status`, and where there is none."""

from __future__ import annotations

import pytest

from deploy.errors import StateError
from deploy.workflows.patches import patches_of
from deploy.workflows.status import stack_status
from tests.unit.workflows.conftest import Lab

RELEASE = 'lmcache=0.5.6 proved="yes"'


def up(lab: Lab, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setenv("STAND_IN_FIXES", ";".join(lines))
    lab.up(lab.spec())


def test_a_stack_tells_of_its_own_fixes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    up(lab, monkeypatch, RELEASE, 'fix=B17 state=applied evidence="no \\"mover\\""')
    found = patches_of(lab.home, "pdkit", None)
    assert (found.lmcache, found.proved, found.warnings) == ("0.5.6", True, [])
    [row] = found.fixes
    assert (row.id, row.evidence) == ("B17", 'no "mover"')
    assert row.states == {"applied": ["producer-0", "consumer-0"]}
    assert row.title and row.link


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((RELEASE, "fix=B17 state=disabled"), "fix B17 is disabled in producer-0, consumer-0"),
        ((RELEASE, "fix=B17 state=failed"), "fix B17 is failed"),
        (("nothing of this",), "producer-0 runs but reported no fixes"),
        (('lmcache=9.9 proved="no"', "fix=B17 state=applied"), "untested with LMCache 9.9"),
    ],
)
def test_status_warns(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], words: str
) -> None:
    up(lab, monkeypatch, *lines)
    assert any(words in line for line in stack_status(lab.home, "pdkit").warnings)


def test_status_is_silent_where_all_is_well(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    up(lab, monkeypatch, RELEASE, "fix=B17 state=applied", "fix=B3 state=not-needed")
    assert stack_status(lab.home, "pdkit").warnings == []


def test_only_the_last_start_counts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (RELEASE, "fix=B17 state=failed")
    up(lab, monkeypatch, *before, RELEASE, "fix=B17 state=applied")
    assert stack_status(lab.home, "pdkit").warnings == []


def test_another_stack_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    up(lab, monkeypatch, RELEASE)
    with pytest.raises(StateError, match="no stack 'other'; running stacks: pdkit"):
        patches_of(lab.home, "other", None)
