"""Discovery and states of fixes, on packages and fixes made here."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType

import pytest
from pdkit_connector.errors import ConnectorError, FixFailed
from pdkit_connector.registry import (
    Fix,
    FixState,
    Need,
    ProbeResult,
    Registry,
    Setting,
    apply_fix,
    disabled_ids,
    discover,
)

MODULE = """
from pdkit_connector.registry import Fix, Need, ProbeResult
FIX = Fix("{id}", "t", "none", "r", lambda s: ProbeResult(Need.NOT_NEEDED, "fine"), lambda s: "")
"""


def make_fix(id="B1", needs=(Need.NEEDED, Need.NOT_NEEDED), apply=lambda _setting: "done", **more):
    found = iter(needs)

    def probe(_setting):
        need = next(found)
        if isinstance(need, Exception):
            raise need
        return ProbeResult(need, "seen")

    return Fix(id, "title", "https://example.org/1", "Reason.", probe, apply, **more)


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "some_fixes").mkdir()
    (tmp_path / "some_fixes" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def load(**modules: str) -> ModuleType:
        for name, text in modules.items():
            (tmp_path / "some_fixes" / f"{name}.py").write_text(text)
        for name in [n for n in sys.modules if n.startswith("some_fixes")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module("some_fixes")

    return load


def test_discovery_walks_the_package_in_the_order_of_numbers(package):
    loaded = package(x=MODULE.format(id="B15"), y=MODULE.format(id="B2b"), z=MODULE.format(id="B3"))
    assert [fix.id for fix in discover(loaded)] == ["B2b", "B3", "B15"]


def test_removing_a_module_removes_its_fix(package, tmp_path):
    package(x=MODULE.format(id="B15"), y=MODULE.format(id="B3"))
    (tmp_path / "some_fixes" / "y.py").unlink()
    assert [fix.id for fix in discover(package())] == ["B15"]


def test_two_modules_with_one_id_are_refused(package):
    with pytest.raises(ConnectorError, match="claim fix B3"):
        discover(package(x=MODULE.format(id="B3"), y=MODULE.format(id="B3")))


def test_a_module_without_a_fix_is_refused(package):
    with pytest.raises(ConnectorError, match="defines no FIX"):
        discover(package(x="A = 1"))


def test_the_kits_own_fixes_are_found_and_documented():
    fixes = discover()
    assert {"B2b", "B2c", "B2d", "B2e", "B15", "B17", "B18"} <= {fix.id for fix in fixes}
    assert fixes[0].id == "B15"
    for fix in fixes:
        assert fix.link == "none" or fix.link.startswith("https://")
        assert fix.title
        assert fix.reason.endswith(".")


@pytest.mark.parametrize(
    ("needs", "state"),
    [
        ((Need.NEEDED, Need.NOT_NEEDED), FixState.APPLIED),
        ((Need.NOT_NEEDED,), FixState.NOT_NEEDED),
        ((Need.NOT_APPLICABLE,), FixState.NOT_APPLICABLE),
        ((Need.NEEDED, Need.NEEDED), FixState.FAILED),
        ((AttributeError("gone"),), FixState.FAILED),
        ((Need.NEEDED, AttributeError("gone")), FixState.FAILED),
    ],
)
def test_each_probe_result_gives_the_right_state(needs, state):
    assert apply_fix(make_fix(needs=needs), Setting()).state is state


def test_apply_is_called_only_where_needed():
    called = []
    apply_fix(make_fix(needs=(Need.NOT_APPLICABLE,), apply=called.append), Setting())
    assert not called


def test_a_failed_fix_stops_the_engine_and_names_the_way_out():
    def fail(_setting):
        raise AttributeError("no such method")

    registry = Registry((make_fix("B9", apply=fail),))
    registry.apply(Setting(), ())
    with pytest.raises(FixFailed) as caught:
        registry.require_no_failure()
    for part in ("B9", "no such method", "https://example.org/1", "PDKIT_DISABLE_FIXES=B9"):
        assert part in str(caught.value)


def test_a_fix_that_is_not_applicable_or_disabled_does_not_stop_the_engine():
    broken = make_fix("B9", needs=(AttributeError("gone"),))
    registry = Registry((broken, make_fix("B8", needs=(Need.NOT_APPLICABLE,))))
    assert [o.state for o in registry.apply(Setting(), {"B9"})] == [
        FixState.DISABLED,
        FixState.NOT_APPLICABLE,
    ]
    registry.require_no_failure()
    assert registry.disabled == ("B9",)


def test_fixes_are_applied_once_a_process():
    calls = []
    registry = Registry((make_fix(apply=lambda s: calls.append(s) or "done"),))
    first = registry.apply(Setting(), ())
    assert registry.apply(Setting(), ()) is first
    assert len(calls) == 1


def test_disabled_ids_come_from_the_environment_and_must_exist():
    fixes = (make_fix("B9"), make_fix("B8"))
    assert disabled_ids(fixes, {"PDKIT_DISABLE_FIXES": " B9, B8 ,"}) == {"B9", "B8"}
    assert disabled_ids(fixes, {}) == frozenset()
    with pytest.raises(ConnectorError, match="B71"):
        disabled_ids(fixes, {"PDKIT_DISABLE_FIXES": "B71"})


def test_only_applied_fixes_get_the_kv_tensors():
    seen = []
    hooked = make_fix("B8", on_kv_caches=seen.append)
    idle = make_fix("B9", needs=(Need.NOT_NEEDED,), on_kv_caches=seen.append)
    registry = Registry((hooked, idle))
    registry.apply(Setting(), ())
    registry.check_kv_caches({"layers.0": 1})
    assert seen == [{"layers.0": 1}]


def test_the_log_line_is_one_line_with_quoted_evidence():
    fix = make_fix(apply=lambda _setting: 'said "x"\nand more')
    line = apply_fix(fix, Setting()).line()
    head, _, evidence = line.partition(" evidence=")
    assert head == "pdkit-connector fix=B1 state=applied"
    assert json.loads(evidence) == 'seen; said "x"\nand more'
    assert "\n" not in line
