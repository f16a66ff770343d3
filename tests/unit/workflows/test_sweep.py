"""A sweep's runs: kept, resumed, interrupted, and nothing left up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from deploy.benchmark.results import Result, Slo, write_result
from deploy.benchmark.sweep import Sweep, read_sweep, rows, write_sweep
from deploy.benchmark.workloads import TokenRange, WorkloadOptions
from deploy.config.sources import load_spec
from deploy.config.spec import StackSpec
from deploy.errors import (
    CheckFailed,
    ConfigError,
    MachineUnfit,
    NotEnoughMemory,
    PdkitError,
    PortTaken,
    StackUnhealthy,
    StateError,
    UsageError,
)
from deploy.runtime.home import Home
from deploy.workflows.bench import BenchOptions
from deploy.workflows.sweep import (
    LiveStacks,
    Planned,
    Settings,
    left_seconds,
    live,
    open_sweep,
    plan_sweep,
    run_sweep,
    write_best,
)
from tests.unit.benchmark.samples import result
from tests.unit.workflows.conftest import Lab

SPEC = StackSpec(vendor="cpu", gpus=2)
OPTIONS = BenchOptions(slo=Slo(ttft_s=1.0), pass_s=6.0)
SETTINGS = Settings(5, "ttft=1s", OPTIONS, ["deploy", "bench", "sweep"])
RATES = {"2a": 10.0, "2a+redis": 11.0, "1p1d": 20.0}


@dataclass
class Stacks:
    """Stand-ins: each topology holds a rate; `faults` are raised where they say.

    Attributes:
        up_now: the topology that is up.
        faults: what `up` or `load` of a topology raises.
        loads: topology and options of each load.
        versions: of a topology, where they are others.
    """

    up_now: str = ""
    faults: dict[str, BaseException] = field(default_factory=dict)
    loads: list[tuple[str, BenchOptions]] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    versions: dict[str, dict[str, None]] = field(default_factory=dict)

    def up(self, spec: StackSpec) -> None:
        assert not self.up_now, "one at a time"
        assert spec.topology is not None
        self.up_now = spec.topology
        self.starts.append(self.up_now)
        self._fail("up")

    def load(self, options: BenchOptions, folder: Path) -> Result:
        self.loads.append((self.up_now, options))
        folder.mkdir(parents=True)
        self._fail("load")
        rate = RATES[self.up_now] * (1 + 0.01 * (len(self.loads) % 3))
        search = {
            "required_share": 0.9, "highest_rate": rate, "low": None, "high": None, "steps": [],
        }  # fmt: skip
        versions = {**result().versions.model_dump(), **self.versions.get(self.up_now, {})}
        one = result(rate_search=search if options.slo else None, versions=versions)
        write_result(folder, one)
        return one

    def down(self) -> None:
        self.up_now = ""

    def _fail(self, where: str) -> None:
        asked = f"{where} {self.up_now}"
        nth = f"{asked} #{self.starts.count(self.up_now)}"
        if (fault := self.faults.get(asked) or self.faults.get(nth)) is not None:
            raise fault


def planned(spec: StackSpec = SPEC) -> Planned:
    return plan_sweep(spec, None, 18000, lambda _: None)


def refusing(topology: str, why: PdkitError) -> Callable[[StackSpec], None]:
    """Return what refuses a topology, or all of them for ""."""

    def require(spec: StackSpec) -> None:
        if topology in ("", spec.topology):
            raise why

    return require


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "state", tmp_path / "cache")


def swept(home: Home, stacks: Stacks, options: BenchOptions = OPTIONS) -> tuple[Path, Sweep]:
    plan = planned()
    slo = SETTINGS.slo if options.slo else None
    folder, sweep = open_sweep(home, plan, replace(SETTINGS, slo=slo, options=options), None)
    return folder, run_sweep(folder, sweep, stacks, plan.stacks, options, lambda _: None)


class TestRuns:
    def test_each_topology_runs_once_a_round_and_the_best_wins(self, home: Home) -> None:
        stacks = Stacks()
        folder, sweep = swept(home, stacks)
        assert stacks.starts == [
            *RATES, *reversed(RATES), *RATES, *reversed(RATES), *RATES,
        ]  # fmt: skip
        assert not stacks.up_now
        assert sweep.verdict is not None
        assert sweep.verdict.winner == "1p1d"
        assert read_sweep(folder) == sweep
        assert all((folder / str(run.folder) / "result.json").is_file() for run in sweep.runs)

    def test_a_search_begins_where_the_ones_before_ended(self, home: Home) -> None:
        stacks = Stacks()
        swept(home, stacks)
        first, second = stacks.loads[:2]
        assert first[1].find_rate
        assert first[1].rate is None
        assert second[1].rate == pytest.approx(10.1, rel=0.05), "as many engines as the first"
        assert second[1].pass_s == 6.0
        assert {options.seed for _, options in stacks.loads} == {0}, "the same requests for all"
        once = [
            {one.one_user_requests > 0, one.router_requests > 0, one.hop_requests > 0}
            for _, one in stacks.loads
        ]
        assert once == 3 * [{True}] + 12 * [{False}], "in the first round only"

    def test_topologies_get_the_same_load_without_an_slo(self, home: Home) -> None:
        stacks = Stacks()
        _, sweep = swept(home, stacks, BenchOptions())
        assert {options.concurrency for _, options in stacks.loads} == {8}
        assert sweep.concurrency == 8
        assert not any(options.find_rate for _, options in stacks.loads)
        assert {(one.repeats, one.whole_file) for _, one in stacks.loads} == {(1, False)}
        chosen = Stacks()
        assert len(swept(home, chosen, BenchOptions(within=0.5))[1].runs) == 15
        assert {one.within for _, one in chosen.loads} == {None}, "it chooses rounds"
        assert {run.rate for run in sweep.runs} == {2.0}

    def test_users_are_as_many_as_are_asked_for(self, home: Home) -> None:
        stacks = Stacks()
        _, sweep = swept(home, stacks, BenchOptions(concurrency=3))
        assert {options.concurrency for _, options in stacks.loads} == {sweep.concurrency} == {3}

    def test_users_do_not_depend_on_what_fits(self, home: Home) -> None:
        little = NotEnoughMemory("9 GiB are available")
        plan = plan_sweep(StackSpec(vendor="cpu"), "1a,2a,1p2d", 18000, refusing("1p2d", little))
        settings = replace(SETTINGS, slo=None, options=BenchOptions())
        assert open_sweep(home, plan, settings, None)[1].concurrency == 12

    def test_it_says_what_ran_where(self, home: Home) -> None:
        _, sweep = swept(home, Stacks(versions={"2a": {"lmcache": None, "redis": None}}))
        one = result()
        assert (sweep.model, sweep.workload) == (one.model, one.workload)
        assert (sweep.machine, sweep.versions) == (one.machine, one.versions)
        assert (sweep.seed, sweep.slo_share, sweep.concurrency) == (0, 0.9, None)

    def test_rounds_follow_the_noise_and_a_killed_sweep_keeps_their_number(
        self, home: Home
    ) -> None:
        options = replace(OPTIONS, within=0.005)
        assert len(swept(home, Stacks(), replace(options, within=0.5))[1].runs) == 15
        stopped = Stacks(faults={"up 1p1d #6": KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            swept(home, stopped, options)
        _, sweep = swept(home, Stacks(), options)
        assert sweep.rounds == 8
        assert len(sweep.runs) == 24

    @pytest.mark.parametrize(
        ("where", "fault"),
        [
            ("up 1p1d", StackUnhealthy("consumer-0 exited")),
            ("up 1p1d", CheckFailed("consumer-0 exited")),
            ("load 1p1d", StackUnhealthy("consumer-0 exited")),
        ],
    )
    def test_a_topology_that_fails_is_a_row_and_not_the_end(
        self, home: Home, where: str, fault: Exception
    ) -> None:
        stacks = Stacks(faults={where: fault})
        _, sweep = swept(home, stacks)
        assert [run.error for run in sweep.of("1p1d")] == ["consumer-0 exited"]
        assert len(sweep.of("2a")) == 5
        assert sweep.verdict is not None
        assert sweep.verdict.winner in ("2a", "2a+redis")
        assert not stacks.up_now

    def test_a_topology_without_memory_is_left_out_until_there_is_some(self, home: Home) -> None:
        little = NotEnoughMemory("9 GiB are available")
        stopped = Stacks(faults={"up 1p1d": little, "up 2a #2": KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            swept(home, stopped)
        folder, sweep = open_sweep(home, planned(), SETTINGS, None)
        assert read_sweep(folder).refused == {"1p1d": "9 GiB are available"}
        assert (len(sweep.runs), sweep.refused) == (3, {})
        again = Stacks()
        assert len(swept(home, again)[1].of("1p1d")) == 5

    @pytest.mark.parametrize(
        "end",
        [
            KeyboardInterrupt(),
            MachineUnfit("the disk is full"),
            PortTaken("port 18000 is taken"),
            UsageError("no room"),
        ],
    )
    def test_an_interrupted_sweep_leaves_no_stack_and_can_continue(
        self, home: Home, end: BaseException
    ) -> None:
        stacks = Stacks(faults={"load 1p1d": end})
        with pytest.raises(type(end)):
            swept(home, stacks)
        assert not stacks.up_now
        again = Stacks()
        folder, sweep = swept(home, again)
        assert again.starts[0] == "1p1d", "the two before it are not run again"
        assert len(again.starts) == 13
        assert len(sweep.runs) == 15
        assert len(list(home.bench.iterdir())) == 1
        assert (folder / "round-1-1p1d" / "result.json").is_file()

    def test_a_finished_sweep_is_not_gone_on_with(self, home: Home) -> None:
        folder, done = swept(home, Stacks())
        assert len(open_sweep(home, planned(), SETTINGS, None)[1].runs) == 15, "no best.yaml yet"
        write_best(folder, done, {})
        assert open_sweep(home, planned(), SETTINGS, None)[1].runs == []


class TestFolder:
    @pytest.mark.parametrize("end", [errno.ENOSPC, errno.ENOTDIR])
    def test_results_that_cannot_be_written_are_one_error(self, home: Home, end: int) -> None:
        stacks = Stacks(faults={"load 1p1d": OSError(end, os.strerror(end))})
        with pytest.raises(MachineUnfit, match=f"cannot be written: {os.strerror(end)}"):
            swept(home, stacks)
        assert not stacks.up_now

    def test_a_file_is_not_a_folder(self, home: Home, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        folder, sweep = open_sweep(home, planned(), SETTINGS, tmp_path / "file")
        with pytest.raises(MachineUnfit, match="file cannot be written"):
            run_sweep(folder, sweep, Stacks(), planned().stacks, OPTIONS, lambda _: None)

    @pytest.mark.parametrize("place", ["/proc/no", "/proc/no/such"])
    def test_a_place_without_folders_is_one_error(self, home: Home, place: str) -> None:
        folder, sweep = open_sweep(home, planned(), SETTINGS, Path(place))
        with pytest.raises(MachineUnfit, match=f"{place} cannot be written: No such file"):
            run_sweep(folder, sweep, Stacks(), planned().stacks, OPTIONS, lambda _: None)

    def test_a_sweep_killed_before_its_verdict_continues(self, home: Home) -> None:
        folder, sweep = swept(home, Stacks())
        write_sweep(folder, sweep.model_copy(update={"verdict": None}))
        again = Stacks()
        assert swept(home, again) == (folder, sweep)
        assert again.starts == []

    def test_other_settings_are_another_sweep(self, home: Home, tmp_path: Path) -> None:
        plan, out = planned(), tmp_path / "out"
        folder, sweep = open_sweep(home, plan, SETTINGS, out)
        stopped = Stacks(faults={"up 2a": KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            run_sweep(folder, sweep, stopped, plan.stacks, OPTIONS, lambda _: None)
        other = replace(SETTINGS, options=replace(OPTIONS, seed=1))
        with pytest.raises(UsageError, match=r"--out .*: it holds a sweep of other settings"):
            open_sweep(home, plan, other, out)
        assert open_sweep(home, plan, SETTINGS, out)[0] == out

    def test_another_free_port_is_the_same_sweep(self, home: Home) -> None:
        stopped = Stacks(faults={"up 1p1d": KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            swept(home, stopped)
        elsewhere = plan_sweep(SPEC, None, 18100, lambda _: None)
        assert len(open_sweep(home, elsewhere, SETTINGS, None)[1].runs) == 2

    def test_time_left_is_that_of_the_runs_done(self, home: Home) -> None:
        _, fresh = open_sweep(home, planned(), SETTINGS, None)
        guess_s = 15 + 2 * 10 + 4 * 6  # all three have two engines
        assert left_seconds(fresh, 6.0) == 15 * guess_s
        run = {"topology": "2a", "round": 0, "folder": None, "seconds": 10.0, "rate": 1.0}
        begun = Sweep.model_validate({**fresh.model_dump(), "runs": [run]})
        assert left_seconds(begun, 6.0) == 4 * 10 + 10 * guess_s
        failed = {**run, "error": "it died"}
        broken = Sweep.model_validate({**fresh.model_dump(), "runs": [failed]})
        assert left_seconds(broken, 6.0) == 10 * guess_s

    def test_more_engines_take_longer_to_start_unless_each_has_its_gpu(self, home: Home) -> None:
        _, plain = open_sweep(home, planned(), SETTINGS, None)

        def left_s(unit: str, *topologies: str) -> float:
            changed = {"unit": unit, "topologies": topologies, "rounds": 1}
            return left_seconds(Sweep.model_validate({**plain.model_dump(), **changed}), 6.0)

        assert left_s("engine", "1p3d") == left_s("engine", "1p1d") + 2 * 10
        assert left_s("GPU", "1p3d") == left_s("GPU", "1p1d") == 180 + 4 * 6


class TestPlan:
    def test_stacks_are_as_asked_for_but_for_name_port_and_split(self) -> None:
        spec = StackSpec(vendor="cpu", gpus=2, model="tiny", layerwise=True, name="mine")
        stacks = planned(spec).stacks
        assert {one.name for one in stacks.values()} == {"mine-sweep"}
        assert {one.port for one in stacks.values()} == {18000}
        assert {one.model for one in stacks.values()} == {"tiny"}
        assert {name: one.layerwise for name, one in stacks.items()} == {
            "2a": False, "2a+redis": True, "1p1d": True,
        }  # fmt: skip

    @pytest.mark.parametrize(
        "why", [ConfigError("--tp: 3 does not divide"), NotEnoughMemory("9 GiB are available")]
    )
    def test_what_cannot_be_started_is_left_out_with_its_reason(
        self, home: Home, why: PdkitError
    ) -> None:
        plan = plan_sweep(SPEC, None, 18000, refusing("1p1d", why))
        _, sweep = open_sweep(home, plan, SETTINGS, None)
        assert sweep.refused == {"1p1d": why.message}
        assert sweep.topologies == ["2a", "2a+redis"]
        assert rows(sweep)[-1].why_not == why.message

    def test_where_nothing_fits_it_is_the_planners_own_error(self) -> None:
        with pytest.raises(NotEnoughMemory, match="9 GiB are available"):
            plan_sweep(SPEC, None, 18000, refusing("", NotEnoughMemory("9 GiB are available")))

    def test_what_did_not_fit_runs_in_a_sweep_that_goes_on_once_it_does(self, home: Home) -> None:
        little = NotEnoughMemory("9 GiB are available")
        plan = plan_sweep(SPEC, None, 18000, refusing("1p1d", little))
        folder, sweep = open_sweep(home, plan, SETTINGS, None)
        with pytest.raises(KeyboardInterrupt):
            stopped = Stacks(faults={"up 2a #2": KeyboardInterrupt()})
            run_sweep(folder, sweep, stopped, plan.stacks, OPTIONS, lambda _: None)
        again, fitting = open_sweep(home, planned(), SETTINGS, None)
        assert again == folder
        assert fitting.runs
        assert (fitting.topologies, fitting.refused) == (list(RATES), {})

    def test_what_was_measured_and_does_not_fit_now_is_not_dropped(self, home: Home) -> None:
        stopped = Stacks(faults={"up 1p1d #2": KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            swept(home, stopped)
        little = NotEnoughMemory("9 GiB are available")
        with pytest.raises(NotEnoughMemory):
            open_sweep(
                home, plan_sweep(SPEC, None, 18000, refusing("1p1d", little)), SETTINGS, None
            )

    @pytest.mark.parametrize(
        ("spec", "listed", "words"),
        [
            ({}, None, "no number of engines to split"),
            ({"gpus": 1}, None, "nothing to compare 1a with"),
            ({"gpus": 2}, "1p2d,2a", "1p2d takes 3 engines, and --gpus is 2"),
            ({}, "2a", "nothing to compare 2a with"),
        ],
    )
    def test_nothing_to_compare(
        self, spec: dict[str, object], listed: str | None, words: str
    ) -> None:
        asked = StackSpec.model_validate({"vendor": "cpu", **spec})
        with pytest.raises(UsageError, match=words):
            plan_sweep(asked, listed, 18000, lambda _: None)


def test_best_is_a_stack_file_for_up(home: Home) -> None:
    folder, sweep = swept(home, Stacks())
    best = write_best(folder, sweep, planned().asked)
    assert best is not None
    assert yaml.safe_load(best.read_text()) == {"vendor": "cpu", "topology": "1p1d"}
    assert best.read_text().startswith("# 1p1d holds 1.")
    spec = load_spec({}, {}, best).spec
    assert (spec.topology, spec.name, spec.port) == ("1p1d", "pdkit", 8000)


class TestPortTakenMeanwhile:
    """A program that takes a port while a sweep runs does not end it."""

    @pytest.fixture
    def ports(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return the ports that were tried; every one is taken but 18300."""
        tried: list[int] = []

        def up(spec: StackSpec, *_: object, **__: object) -> tuple[None, None]:
            tried.append(spec.port)
            if spec.port != 18300:
                raise PortTaken(f"port {spec.port} (for router) is taken")
            return None, None

        monkeypatch.setattr(live, "bring_up", up)
        monkeypatch.setattr(live, "stop_stack", lambda *_: None)
        monkeypatch.setattr(live, "free_port", lambda _: tried[-1] + 100)
        return tried

    def test_another_one_is_tried(self, home: Home, ports: list[int]) -> None:
        lines: list[str] = []
        LiveStacks(home, "s", [], lines.append).up(SPEC.model_copy(update={"port": 18000}))
        assert ports == [18000, 18100, 18200, 18300]
        assert lines[0] == "port 18000 (for router) is taken: trying again with port 18100"

    def test_a_taken_port_is_retried_five_times(self, home: Home, ports: list[int]) -> None:
        with pytest.raises(PortTaken):
            LiveStacks(home, "s", [], print).up(SPEC.model_copy(update={"port": 20000}))
        assert len(ports) == 5

    def test_a_port_chosen_by_the_user_is_not_replaced(self, home: Home, ports: list[int]) -> None:
        with pytest.raises(PortTaken):
            LiveStacks(home, "s", [], print, own_port=True).up(SPEC)
        assert len(ports) == 1


class TestLive:
    """On stacks of stand-in services."""

    def stacks(self, lab: Lab) -> LiveStacks:
        return LiveStacks(lab.home, "pdkit-sweep", ["deploy"], lab.lines.append)

    def test_a_whole_run(self, lab: Lab) -> None:
        stacks, spec = self.stacks(lab), lab.spec(name="pdkit-sweep", topology="1a")
        workload = WorkloadOptions(
            input_tokens=TokenRange(100, 100), output_tokens=TokenRange(2, 2)
        )
        options = BenchOptions(workload=workload, requests=4, repeats=1, warmup=0)
        with stacks.claimed():
            stacks.require(spec, workload)
            too_long = WorkloadOptions(input_tokens=TokenRange(100_000, 100_000))
            with pytest.raises(ConfigError, match="do not fit the model's context of 512"):
                stacks.require(spec, too_long)
            assert not lab.pids()
            stacks.up(spec)
            found = stacks.load(options, lab.folder / "run")
            assert (found.stack.topology, found.stack.redis) == ("1a", False)
            assert found.repeats[0].completed == 4
            stacks.down()
            assert lab.pids() == []
        assert not list(lab.home.bench.iterdir())

    def test_a_workload_that_does_not_fit_fails_this_topology(self, lab: Lab) -> None:
        stacks, spec = self.stacks(lab), lab.spec(name="pdkit-sweep", topology="1a")
        workload = WorkloadOptions(input_tokens=TokenRange(100_000, 100_000))
        with stacks.claimed():
            stacks.up(spec)
            with pytest.raises(CheckFailed, match="do not fit the model's context"):
                stacks.load(BenchOptions(workload=workload), lab.folder / "run")

    def test_a_killed_sweeps_stack_is_taken_down_and_no_other(self, lab: Lab) -> None:
        lab.up(lab.spec(topology="1p1d"))
        mine = set(lab.pids())
        lab.home.bench.mkdir()
        (lab.home.bench / "sweep-stack").write_text("pdkit-sweep\n")
        self.stacks(lab).up(lab.spec(name="pdkit-sweep", topology="2a"))
        assert set(lab.pids()) > mine
        with self.stacks(lab).claimed():
            assert set(lab.pids()) == mine
        assert set(lab.pids()) == mine

    def test_a_users_stack_of_that_name_is_left_alone(self, lab: Lab) -> None:
        lab.up(lab.spec(name="pdkit-sweep", topology="1p1d"))
        before = set(lab.pids())
        refused = pytest.raises(StateError, match="a stack 'pdkit-sweep', which no sweep started")
        with refused, self.stacks(lab).claimed():
            pass
        assert set(lab.pids()) == before
