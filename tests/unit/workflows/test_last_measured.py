"""What a benchmark measured is said where somebody plans the same on the same machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.benchmark.results import Result
from deploy.planning.plan import Plan
from deploy.runtime import last_measured as module
from deploy.runtime.home import Home
from deploy.runtime.last_measured import last_measured, read_measured
from deploy.workflows.bench.run import keep_break_even
from tests.unit.benchmark.samples import result
from tests.unit.benchmark.test_break_even import measured
from tests.unit.stack.cases import machine_with

Make = Callable[..., Plan]
# Of a version that knew one load.
OLD = '{"a": {"tokens": 256, "load": "2 in flight", "at": "2026-01-01", "result": "/bench"}}'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(module, "processor_name", lambda: ran().machine.processor)
    return Home(tmp_path / "state", tmp_path / "cache")


def ran(**changed: Any) -> Result:
    return result(repeats=[measured(**changed)])


def test_the_last_result_of_the_same_model_is_used(plan: Make, home: Home) -> None:
    made = plan()
    assert last_measured(home, made) is None
    keep_break_even(home, named(ran(), made), home.bench / "a-run")
    found = last_measured(home, made)
    assert found is not None and found.pays
    text = str(found)
    assert "from 256 tokens on (2 requests/s offered)" in text
    assert text.endswith(str(home.bench / "a-run"))


def test_one_user_and_the_load_are_both_said(plan: Make, home: Home) -> None:
    alone = measured(rate=None, concurrency=1, prefill_s=1e-6)
    both = result(repeats=[measured()], one_user=alone)
    keep_break_even(home, named(both, plan()), home.bench / "a-run")
    assert (
        "for no length (one request at a time), from 256 tokens on (2 requests/s offered)"
        in str(last_measured(home, plan()))
    )


def test_the_last_counts_and_others_stay(plan: Make, home: Home) -> None:
    made = plan()
    other = ran().model_copy(update={"model": ran().model.model_copy(update={"name": "other"})})
    keep_break_even(home, other, home.bench / "of-another-model")
    keep_break_even(home, named(ran(), made), home.bench / "first")
    # It computes faster than Redis delivers.
    keep_break_even(home, named(ran(prefill_s=1e-6), made), home.bench / "second")
    found = last_measured(home, made)
    assert found is not None and not found.pays and "for every prompt length" in str(found)
    assert len(read_measured(home)) == 2


def test_a_run_that_loaded_nothing_leaves_it(plan: Make, home: Home) -> None:
    made = plan()
    keep_break_even(home, named(ran(), made), home.bench / "first")
    keep_break_even(home, named(ran(redis_path=None), made), home.bench / "second")
    assert str(last_measured(home, made)).endswith("first")


def test_a_result_of_another_machine_is_not_used(
    plan: Make, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan()
    keep_break_even(home, named(ran(), made), home.bench / "first")
    on_a_gpu = plan(vendor="cuda", machine=machine_with("cuda", 0, 1))
    assert last_measured(home, on_a_gpu) is None
    monkeypatch.setattr(module, "processor_name", lambda: "another")
    assert last_measured(home, made) is None


def test_a_plan_that_loads_nothing_has_no_result(plan: Make, home: Home) -> None:
    keep_break_even(home, named(ran(), plan()), home.bench / "first")
    assert last_measured(home, plan(topology="2a")) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"b": 1}}', OLD])
def test_a_file_that_is_broken_says_nothing(plan: Make, home: Home, text: str) -> None:
    home.bench.mkdir(parents=True)
    home.measured_file.write_text(text)
    assert last_measured(home, plan()) is None
    keep_break_even(home, named(ran(), plan()), home.bench / "first")
    assert last_measured(home, plan()) is not None


def named(one: Result, made: Plan) -> Result:
    model = one.model.model_copy(update={"name": made.model.served_name})
    machine = one.machine.model_copy(update={"gpus": []})
    return one.model_copy(update={"model": model, "machine": machine})
