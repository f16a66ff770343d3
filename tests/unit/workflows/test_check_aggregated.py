"""`check` on aggregated engines: each loads what another stored; without Redis they are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from deploy.errors import UsageError
from deploy.output.check_view import check_view
from deploy.output.views import status_view
from deploy.verify.report import CheckReport
from deploy.workflows.check import CheckOptions, check_stack
from deploy.workflows.down import stop_stack
from deploy.workflows.running import require_stack
from deploy.workflows.status import stack_status
from tests.unit.workflows.conftest import Lab, opened


def check(lab: Lab, name: str) -> CheckReport:
    return check_stack(lab.home, name, lab.lines.append)


def port_of_the_second(lab: Lab, name: str) -> int:
    return require_stack(lab.home, name).prepared.plan.engines[1].port


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab in which the stacks 'alone' and 'shared' are up, of two engines each."""
    with opened(tmp_path_factory.mktemp("aggregated")) as made:
        made.up(made.spec(name="shared", topology="2a+redis"))
        made.up(made.spec(name="alone", topology="2a"))
        yield made
        for name in ("shared", "alone"):
            stop_stack(made.home, name, made.lines.append)


@pytest.fixture
def with_faults(lab: Lab) -> Iterator[Callable[..., None]]:
    yield lambda *words: lab.faults.write_text(" ".join(words)) and None
    lab.faults.unlink(missing_ok=True)


class TestWithRedis:
    def test_each_engine_loads_what_the_other_stored(self, lab: Lab) -> None:
        report = check(lab, "shared")
        assert report.failures == []
        assert [pair.name for pair in report.pairs] == [
            "engine-0 → engine-1", "engine-1 → engine-0",
        ]  # fmt: skip
        assert all(pair.hits.eligible_rate == 1.0 for pair in report.pairs)
        # Two prompts of 4⅓ chunks: the second engine loads what the first one stored.
        assert report.race.hits.hits == report.race.hits.eligible == 2 * 4 * 64
        assert report.turns is not None
        assert report.turns.hits.hits == report.turns.hits.eligible > 0
        assert report.store is not None
        assert report.store.keys_removed
        assert report.store.keys_after == report.store.keys_removed, "all were the check's"

    def test_status_counts_the_hits_of_all(self, lab: Lab) -> None:
        check(lab, "shared")
        status = stack_status(lab.home, "shared")
        assert {service.role for service in status.services} == {"redis", "aggregated", "router"}
        assert 0 < status.external_hit_rate < 1

    @pytest.mark.parametrize(
        ("fault", "failure"),
        [
            ("both:stores-nothing", "eligible tokens were loaded"),
            ("both:wrong-kv", "answers differ"),
            ("both:refuses-router-{port}", "no prompt through the router reached engine-1"),
        ],
    )
    def test_a_broken_one_fails(
        self, lab: Lab, with_faults: Callable[..., None], fault: str, failure: str
    ) -> None:
        with_faults(fault.format(port=port_of_the_second(lab, "shared")))
        failed = check(lab, "shared").failures
        assert any(failure in sentence for sentence in failed), failed


class TestWithoutRedis:
    def test_answers_are_compared_and_nothing_is_reused(self, lab: Lab) -> None:
        report = check(lab, "alone")
        assert report.failures == []
        assert report.pairs == []
        assert report.equivalence.compared >= 6
        assert report.as_dict()["redis"] is None
        assert "redis" not in report.items
        assert "2 engines share no KV, so there is nothing to reuse" in check_view(report)

    def test_status_has_no_redis_and_no_warning(self, lab: Lab) -> None:
        status = stack_status(lab.home, "alone")
        assert status.healthy
        assert status.warnings == []
        assert "Redis" not in status_view(status)

    def test_an_engine_that_the_router_leaves_out_is_found(
        self, lab: Lab, with_faults: Callable[..., None]
    ) -> None:
        with_faults(f"alone:refuses-router-{port_of_the_second(lab, 'alone')}")
        assert check(lab, "alone").failures == ["no prompt through the router reached engine-1"]

    def test_an_engine_that_answers_otherwise_is_found(
        self, lab: Lab, with_faults: Callable[..., None]
    ) -> None:
        with_faults(f"alone:other-weights-{port_of_the_second(lab, 'alone')}")
        assert any("answers differ" in said for said in check(lab, "alone").failures)

    @pytest.mark.parametrize(
        ("options", "option"),
        [
            (CheckOptions(pairs=["engine-0:*"]), "--pairs"),
            (CheckOptions(prompt="Hello"), "--prompt-file"),
        ],
    )
    def test_options_of_shared_kv_are_refused(
        self, lab: Lab, options: CheckOptions, option: str
    ) -> None:
        with pytest.raises(UsageError, match=f"{option}: the engines of 2a share no KV"):
            check_stack(lab.home, "alone", lab.lines.append, options)
