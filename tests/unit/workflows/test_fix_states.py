"""What is said of the fixes: by a stack's engines, by `deploy status`, and where there is none."""

from __future__ import annotations

import pytest

from deploy.errors import StateError
from deploy.runtime import fixes, whole_page
from deploy.workflows.fix_states import fixes_of
from deploy.workflows.running import require_stack
from deploy.workflows.status import stack_status
from tests.unit.workflows.conftest import Lab, silent_at_first

RELEASE = 'pdkit_connector_info{lmcache="0.5.6",tested="yes"} 1'


def fix(name: str, state: str, evidence: str = "") -> str:
    return f'pdkit_fix_info{{fix="{name}",state="{state}",evidence="{evidence}"}} 1'


def up(lab: Lab, monkeypatch: pytest.MonkeyPatch, *metrics: str) -> None:
    monkeypatch.setenv("STAND_IN_REPORT", "\n".join(metrics))
    lab.up(lab.spec())


def test_a_stack_tells_of_its_own_fixes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    up(lab, monkeypatch, RELEASE, fix("B17", "applied", 'no \\"mover\\"'))
    found = fixes_of(lab.home, "pdkit", None)
    assert (found.lmcache, found.tested, found.warnings) == ("0.5.6", True, [])
    [row] = found.fixes
    assert (row.id, row.evidence) == ("B17", 'no "mover"')
    assert row.states == {"applied": ["producer-0", "consumer-0"]}
    assert row.title and row.link


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ((RELEASE, fix("B17", "disabled")), "fix B17 is disabled in producer-0, consumer-0"),
        ((RELEASE, fix("B17", "failed")), "fix B17 is failed"),
        ((), "producer-0 answers but reports no fixes"),
        (
            ('pdkit_connector_info{lmcache="9.9",tested="no"} 1', fix("B17", "applied")),
            "untested with LMCache 9.9",
        ),
    ],
)
def test_status_warns_of_missing_fixes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, metrics: tuple[str, ...], words: str
) -> None:
    up(lab, monkeypatch, *metrics)
    assert any(words in line for line in stack_status(lab.home, "pdkit").warnings)


def test_status_is_silent_where_all_is_well(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    up(lab, monkeypatch, RELEASE, fix("B17", "applied"), fix("B3", "not needed"))
    # It would start an interpreter, which takes longer than the rest of `status`.
    monkeypatch.setattr(fixes, "known_fixes", lambda _: pytest.fail("nothing is to be named"))
    assert stack_status(lab.home, "pdkit").warnings == []


def test_an_engine_whose_worker_is_late_is_asked_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    up(lab, monkeypatch, RELEASE, fix("B17", "applied"))
    asked = silent_at_first(monkeypatch, 1)
    assert stack_status(lab.home, "pdkit").warnings == []
    assert len(asked) == 2 * 2, "two engines"
    [row] = fixes_of(lab.home, "pdkit", None).fixes
    assert row.states == {"applied": ["producer-0", "consumer-0"]}


def test_status_warns_of_a_worker_that_stays_silent(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    up(lab, monkeypatch, RELEASE, fix("B17", "applied"))
    monkeypatch.setattr(whole_page, "_WAIT_S", 0.2)
    silent_at_first(monkeypatch, 1000)
    warnings = stack_status(lab.home, "pdkit").warnings
    assert (
        "consumer-0: 1 of its workers did not report, so its counters may be old; if this "
        "persists: deploy restart consumer-0 --name pdkit" in warnings
    )


def test_nothing_depends_on_the_logs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are rotated while the engines serve."""
    up(lab, monkeypatch, RELEASE, fix("B17", "applied"))
    for log in lab.home.stack("pdkit").logs_dir.glob("*.log"):
        log.write_bytes(b"")
    assert stack_status(lab.home, "pdkit").warnings == []
    assert fixes_of(lab.home, "pdkit", None).fixes


def test_an_engine_that_does_not_answer_is_not_called_silent(lab: Lab) -> None:
    lab.up(lab.spec())
    running = require_stack(lab.home, "pdkit")
    running.launcher.stop({"x": running.state.services["consumer-0"]}, grace_s=1)
    found = fixes_of(lab.home, "pdkit", None)
    assert found.silent == []
    assert [row.states for row in found.fixes] == [{"applied": ["producer-0"]}]


def test_another_stack_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    up(lab, monkeypatch, RELEASE)
    with pytest.raises(StateError, match="no stack 'other'; running stacks: pdkit"):
        fixes_of(lab.home, "other", None)
