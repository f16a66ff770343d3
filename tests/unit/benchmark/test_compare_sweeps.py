"""Two sweeps side by side: topology by topology, and only like ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deploy.benchmark.compare_sweeps import ComparedSweeps, compare_sweeps
from deploy.benchmark.sweep import Sweep, judged
from deploy.errors import UsageError
from deploy.output.bench_view import sweeps_view
from tests.unit.benchmark.samples import result
from tests.unit.benchmark.test_sweep import sweep, times


def done(rates: dict[str, Sequence[float | None]], **changed: object) -> Sweep:
    """Return a finished sweep with these rates."""
    one = result()
    said = {name: getattr(one, name) for name in ("model", "workload", "machine", "versions")}
    found = sweep(rates, **{**said, "seed": 0, "slo_share": 0.9, **changed})
    return judged(found)


FIRST = done({"2a": times(10), "1p1d": times(8)})


def verdicts(found: ComparedSweeps) -> dict[str, str]:
    return {one.topology: one.verdict for one in found.topologies}


def test_each_topology_is_compared_with_itself() -> None:
    found = compare_sweeps(FIRST, done({"2a": times(10)[::-1], "1p1d": times(12)[::-1]}))
    assert verdicts(found) == {"2a": "no significant difference", "1p1d": "better"}
    ratio = next(one.ratio for one in found.topologies if one.topology == "1p1d")
    assert ratio.low is not None and ratio.high is not None
    assert 1.3 < ratio.low < 1.5 < ratio.high < 1.7
    assert verdicts(compare_sweeps(FIRST, done({"2a": times(8)}))) == {"2a": "worse"}


def test_a_margin_below_the_searchs_own_step_is_not_a_difference() -> None:
    found = compare_sweeps(done({"2a": [10.0] * 5}), done({"2a": [10.8] * 5}))
    assert verdicts(found) == {"2a": "no significant difference"}


def test_too_few_rounds_tell_nothing() -> None:
    found = compare_sweeps(FIRST, done({"2a": times(20, 4)}))
    assert verdicts(found) == {"2a": "too few repeats"}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"model": result().model.model_copy(update={"name": "other"})}, "model.name"),
        ({"workload": {"name": "multi-turn"}}, "workload.name"),
        ({"machine": result().machine.model_copy(update={"cores": 9})}, "machine.cores"),
        ({"versions": result().versions.model_copy(update={"lmcache": "9"})}, "versions.lmcache"),
        ({"slo": "ttft=2s"}, "slo.ttft_s"),
        ({"slo": None}, "slo"),
        ({"slo_share": 0.5}, "slo_share"),
        ({"concurrency": 4}, "concurrency"),
        ({"seed": 1}, "seed"),
        ({"machine": None}, "machine"),
    ],
)
def test_unlike_sweeps_are_refused_unless_told_to(changed: dict[str, object], field: str) -> None:
    other = done({"2a": times(10)}, **changed)
    with pytest.raises(UsageError, match=f"differ in: .*{field}") as refused:
        compare_sweeps(FIRST, other)
    assert "--anyway" in refused.value.hint
    found = compare_sweeps(FIRST, other, anyway=True)
    assert field in [one.field for one in found.unlike]
    assert f"differs: {field}: " in sweeps_view(found, FIRST, other)


def test_an_slo_in_other_words_and_a_busier_machine_are_alike() -> None:
    busy = result().machine.model_copy(update={"load_1m": 5.0})
    assert not compare_sweeps(FIRST, done({"2a": times(9)}, slo="ttft=1000ms", machine=busy)).unlike


def test_only_plain_engines_have_no_redis_to_be_alike_in() -> None:
    plain = result().versions.model_copy(update={"lmcache": None, "redis": None})
    assert not compare_sweeps(FIRST, done({"2a": times(9)}, versions=plain)).unlike


def test_what_only_one_measured_is_named() -> None:
    second = done({"2a": times(10), "1p2d": times(9)}, refused={"1p1d": "too little memory"})
    notes = compare_sweeps(FIRST, second.model_copy(update={"verdict": None})).notes
    assert notes[:3] == [
        "B is not finished: only its finished runs are compared",
        "1p1d in B: too little memory",
        "1p2d: not in A",
    ]
    with pytest.raises(UsageError, match="no topology in common that has a rate: 2a, 1p1d; and 3a"):
        compare_sweeps(FIRST, done({"3a": times(3)}))


def test_the_view_has_rates_ratio_interval_and_verdict() -> None:
    second = done({"2a": times(15)})
    lines = sweeps_view(compare_sweeps(FIRST, second), FIRST, second).splitlines()
    assert lines[0].startswith("A  random, 2026-01-01T00:00:00+00:00: Do not disaggregate")
    row = next(line for line in lines if line.startswith("2a "))
    assert row.split()[:4] == ["2a", "10.00", "15.00", "1.50"]
    assert row.endswith("better")
