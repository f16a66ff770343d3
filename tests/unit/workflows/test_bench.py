"""`deploy bench` on a stack of stand-ins: real counters, real files, real interrupts."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.benchmark.load import Load, LoadTarget
from deploy.benchmark.results import (
    GpuUse,
    Repeat,
    RequestRecord,
    Result,
    Slo,
    read_requests,
    read_result,
)
from deploy.benchmark.workloads import Conversation, TokenRange, WorkloadOptions
from deploy.errors import MachineUnfit, StackUnhealthy, StateError, UsageError
from deploy.runtime.gpu_meter import GpuMeter, MeteredGpu
from deploy.workflows.bench import BenchOptions, bench_stack, hop, open_folder, passes
from deploy.workflows.bench import run as bench_run
from tests.unit.benchmark import samples
from tests.unit.workflows.conftest import Lab

CHUNK = 64  # of the lab's stacks
OPTIONS = BenchOptions(
    workload=WorkloadOptions(input_tokens=TokenRange(200, 200), output_tokens=TokenRange(4, 4)),
    requests=6,
    repeats=2,
    warmup=1,
    hop_requests=1,
    router_requests=0,
    one_user_requests=0,
)
Bench = Callable[..., Result]


@pytest.fixture
def bench(served: Lab, tmp_path: Path) -> Bench:
    """Return what loads the served stack and keeps the result in the test's folder."""

    def run(**changed: Any) -> Result:
        options = BenchOptions(**{**OPTIONS.__dict__, **changed})
        return bench_stack(
            served.home,
            "pdkit",
            options,
            folder=tmp_path,
            command=["deploy", "bench"],
            report=served.lines.append,
        )

    return run


@pytest.fixture(autouse=True)
def quiet(served: Lab) -> Iterator[None]:
    served.lines.clear()
    yield


class TestResult:
    def test_file_holds_what_is_returned(self, bench: Bench, tmp_path: Path) -> None:
        result = bench()
        assert read_result(tmp_path) == result
        assert not result.interrupted
        assert [(r.index, r.sent, r.completed, r.failed) for r in result.repeats] == [
            (0, 6, 6, 0), (1, 6, 6, 0),
        ]  # fmt: skip
        lines = list(read_requests(tmp_path))
        assert [(line.repeat, line.index) for line in lines] == [
            (repeat, index) for repeat in range(2) for index in range(6)
        ]
        assert {line.output_tokens for line in lines} == {4}

    def test_hits_are_the_counters(self, bench: Bench) -> None:
        """Three whole chunks of 200 tokens: loaded by the consumer, computed by the producer."""
        for repeat in bench().repeats:
            assert repeat.hits is not None
            assert repeat.hits.external == repeat.hits.eligible == 6 * 3 * CHUNK
            assert repeat.hits.local == 0
            assert repeat.hits.computed == 2 * 6 * 200 - 6 * 3 * CHUNK
            assert repeat.hits.queried == 6 * 200

    def test_missing_hits_show(self, bench: Bench, with_faults: Callable[..., None]) -> None:
        with_faults("producer:stores-nothing")
        hits = bench().repeats[0].hits
        assert hits is not None
        assert (hits.external, hits.eligible) == (0, 6 * 3 * CHUNK)

    def test_tokens_in_the_prefix_cache_are_not_eligible(self, bench: Bench) -> None:
        workload = WorkloadOptions(
            "shared-prefix", input_tokens=TokenRange(72, 72), prefix_tokens=128, prefixes=1,
            output_tokens=TokenRange(1, 1),
        )  # fmt: skip
        hits = bench(workload=workload, repeats=1, concurrency=1).repeats[0].hits
        assert hits is not None
        assert hits.local > 0
        assert hits.external == hits.eligible

    def test_conversations_are_whole(self, bench: Bench, tmp_path: Path) -> None:
        workload = WorkloadOptions(
            "multi-turn", input_tokens=TokenRange(20, 20), prefix_tokens=64, turns=3,
            output_tokens=TokenRange(2, 2),
        )  # fmt: skip
        bench(workload=workload, repeats=1)
        lengths: dict[int | None, list[int]] = {}
        for line in read_requests(tmp_path):
            lengths.setdefault(line.conversation, []).append(line.input_tokens)
        assert lengths == {0: [84, 106, 128], 1: [84, 106, 128]}

    def test_usage_of_every_service(self, bench: Bench) -> None:
        usage = bench().repeats[0].usage
        assert usage is not None
        services = {"producer-0", "consumer-0", "consumer-1", "router", "bench"}
        assert services < usage.cpu_s.keys()
        assert usage.peak_rss_bytes["producer-0"] > 1 << 20
        assert usage.gpu is None, "the stack has none"

    def test_use_of_gpus_and_why_some_is_not_known(
        self, bench: Bench, served: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Meter(GpuMeter):
            trouble = "nvidia-smi ended with 9"
            measured = {1: MeteredGpu([20, 41], 5 << 30), 2: MeteredGpu([], 1)}  # noqa: RUF012

        monkeypatch.setattr(passes, "GpuMeter", Meter)
        usage = bench(repeats=1).repeats[0].usage
        assert usage is not None
        assert usage.gpu == {
            "1": GpuUse(utilization=0.305, peak_memory_bytes=5 << 30),
            "2": GpuUse(utilization=None, peak_memory_bytes=1),
        }
        said = "warning: GPU use is partly or wholly unknown: nvidia-smi ended with 9"
        assert served.lines.count(said) == 1

    def test_a_result_has_the_facts_of_stack_and_machine(self, bench: Bench) -> None:
        result = bench(repeats=1)
        assert result.stack.topology == "1p2d"
        assert (result.stack.engines, result.stack.gpus, result.stack.redis) == (3, 0, True)
        assert result.machine.cores > 0
        assert result.versions.redis is not None
        assert result.workload.model_dump()["input_tokens"] == "200"


class TestWithin:
    @pytest.mark.parametrize(("spread", "count"), [(0.0, 5), (0.05, 7)])
    def test_repeats_follow_the_noise_of_the_first_five(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, spread: float, count: int
    ) -> None:
        monkeypatch.setattr(bench_run, "noise", lambda values: spread if len(values) == 5 else 1.0)
        assert len(bench(within=0.05, requests=1, hop_requests=0).repeats) == count

    def test_the_noisier_of_ttft_and_throughput_counts(self) -> None:
        steady = {"p50": 0.1, "p90": 0.1, "p99": 0.1, "mean": 0.1}
        made = [
            Repeat.model_validate(samples.repeat(at, requests_per_s=2.0 + at / 10, ttft_s=steady))
            for at in range(5)
        ]
        assert bench_run._enough(made, 0.05) > 5
        alike = [one.model_copy(update={"requests_per_s": 2.0}) for one in made]
        assert bench_run._enough(alike, 0.05) == 5


class TestHop:
    def test_is_the_front_less_the_engines(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The front takes 9 s, each engine less; one producer and one consumer are asked."""
        asked: list[tuple[str, tuple[int, ...]]] = []

        def run_load(target: LoadTarget, conversations: list[Conversation], **_: Any) -> Load:
            asked.append((target.url, conversations[0].turns[0].added))
            took = {0: 9.0, 1: 2.0, 2: 3.0}[(len(asked) - 1) % 3]
            record = RequestRecord(
                repeat=0, index=0, arrival_s=0, ttft_s=took, itl_s=[], e2e_s=took,
                input_tokens=16, output_tokens=1,
            )  # fmt: skip
            return Load([record], took, 0, 0)

        monkeypatch.setattr(hop, "run_load", run_load)
        found = bench(repeats=1, hop_requests=4).hop_s
        assert found is not None
        assert found.p50 == found.p99 == 4.0
        assert len({url for url, _ in asked}) == 3
        assert len({prompt for _, prompt in asked}) == 4
        assert bench(repeats=1, hop_requests=0).hop_s is None


class TestThroughput:
    def test_is_of_all_engines_in_rounds_that_alternate(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the router a pass takes 2, 8 and 1 s, directly always 1 s."""
        took = iter((2.0, 1.0, 8.0, 1.0, 1.0, 1.0))
        asked: list[tuple[list[list[str]], int, int]] = []

        def run_routes(
            routes: list[list[LoadTarget]], conversations: list[Conversation], *, concurrency: int
        ) -> Load:
            urls = [[one.url for one in route] for route in routes]
            asked.append((urls, len(conversations), concurrency))
            return Load([], next(took), 0, 0)

        monkeypatch.setattr(hop, "run_routes", run_routes)
        found = bench(repeats=1, router_requests=30).router_throughput
        assert found is not None
        assert (found.routed_per_s, found.direct_per_s, found.share) == (15.0, 30.0, 0.5)
        assert found.in_flight == 12
        assert {(count, in_flight) for _, count, in_flight in asked} == {(30, 12)}
        (front,), *_ = asked[0][0]
        assert [routes for routes, *_ in asked[::2]] == [[[front]]] * 3
        (producer, first), (same, second) = asked[1][0]
        assert producer == same and len({front, producer, first, second}) == 4

    def test_real_requests_by_router_and_engines(self, bench: Bench) -> None:
        found = bench(repeats=1, router_requests=4).router_throughput
        assert found is not None
        assert found.routed_per_s > 0 and found.direct_per_s > 0

    def test_none_where_requests_fail_or_none_is_wanted(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert bench(repeats=1).router_throughput is None
        lost = RequestRecord(
            repeat=0, index=0, arrival_s=0, ttft_s=None, itl_s=[], e2e_s=1, input_tokens=0,
            output_tokens=0, error="refused",
        )  # fmt: skip
        monkeypatch.setattr(hop, "run_routes", lambda *_, **__: Load([lost], 1.0, 0, 0))
        assert bench(repeats=1, router_requests=4).router_throughput is None


class TestOneUser:
    def test_sends_new_prompts_one_at_a_time(self, bench: Bench, tmp_path: Path) -> None:
        result = bench(repeats=1, one_user_requests=3)
        alone = result.one_user
        assert alone is not None
        assert (alone.sent, alone.completed, alone.concurrency, alone.rate) == (3, 3, 1, None)
        assert alone.hits is not None
        assert alone.hits.external == alone.hits.eligible == 3 * 3 * CHUNK
        assert alone.requests_per_s * alone.e2e_s.mean <= 1.01 if alone.e2e_s else False
        assert len(result.repeats) == 1
        assert len(list(read_requests(tmp_path))) == 6, "they are of no repeat"

    def test_not_where_the_load_is_one_user(self, bench: Bench) -> None:
        assert bench(repeats=1, one_user_requests=3, concurrency=1).one_user is None

    @pytest.mark.parametrize(("wanted", "kept"), [(0, 0), (2, 1)])
    def test_without_it_the_last_break_even_stays(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, wanted: int, kept: int
    ) -> None:
        """A sweep asks for it in its first round only."""
        written: list[Result] = []
        monkeypatch.setattr(
            bench_run, "keep_break_even", lambda _home, result, _folder: written.append(result)
        )
        bench(repeats=1, one_user_requests=wanted)
        assert len(written) == kept


class TestSlo:
    def test_goodput_counts_what_keeps_it(self, bench: Bench) -> None:
        (repeat,) = bench(repeats=1, slo=Slo(ttft_s=100)).repeats
        assert repeat.within_slo == 1
        assert repeat.goodput_per_s == pytest.approx(repeat.requests_per_s, rel=0.01)
        (repeat,) = bench(repeats=1, slo=Slo(ttft_s=1e-6)).repeats
        assert (repeat.within_slo, repeat.goodput_per_s) == (0, 0)

    def test_search_keeps_every_step(self, bench: Bench) -> None:
        result = bench(slo=Slo(ttft_s=1e-6), find_rate=True, rate=200.0, steps=2)
        assert [repeat.rate for repeat in result.repeats] == [200, pytest.approx(200 / 1.2)]
        assert result.rate_search is not None
        assert result.rate_search.highest_rate is None

    def test_search_begins_with_the_rate_of_the_warm_up(self, bench: Bench) -> None:
        search = {"slo": Slo(ttft_s=100), "find_rate": True, "steps": 1}
        (repeat,) = bench(**search, warmup=4).repeats
        assert repeat.rate is not None
        # Results have the warm-up's time to the millisecond, and a fast one takes few.
        assert 4 / repeat.rate == pytest.approx(repeat.warmup_s, abs=0.0005)
        (repeat,) = bench(**search, warmup=0).repeats
        assert repeat.rate == 1


class TestInterrupted:
    def test_finished_repeats_stay(
        self, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        turns = iter(range(2))
        load = passes.run_load

        def interrupted(*args: Any, **named: Any) -> Any:
            if "repeat" in named and next(turns) == 1:
                raise KeyboardInterrupt
            return load(*args, **named)

        monkeypatch.setattr(passes, "run_load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench()
        kept = read_result(tmp_path)
        assert kept.interrupted
        assert [repeat.index for repeat in kept.repeats] == [0]
        assert len(list(read_requests(tmp_path))) == 6


class TestRefused:
    def test_a_full_disk_is_refused(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1000))
        with pytest.raises(MachineUnfit, match=r"0 MiB are free in .*the result may take 1 MiB"):
            bench()

    def test_prompts_beyond_the_context(self, bench: Bench) -> None:
        workload = WorkloadOptions(input_tokens=TokenRange(500, 500))
        with pytest.raises(UsageError, match="up to 532 tokens do not fit"):
            bench(workload=workload)

    def test_an_invalid_dataset_is_refused(self, bench: Bench, tmp_path: Path) -> None:
        file = tmp_path / "broken.jsonl"
        file.write_text('{"prompt": "ok"}\n{\n')
        workload = WorkloadOptions("dataset", file=file)
        with pytest.raises(UsageError, match="1 of 2 lines cannot be used: line 2: not JSON"):
            bench(workload=workload)

    def test_stack_that_answers_nothing(
        self, bench: Bench, with_faults: Callable[..., None]
    ) -> None:
        with_faults("producer:fails", "consumer:fails")
        with pytest.raises(StackUnhealthy, match="the warm-up was answered: HTTP 500"):
            bench()

    def test_a_missing_stack_is_refused(self, served: Lab, tmp_path: Path) -> None:
        with pytest.raises(StateError, match="no stack 'other'"):
            bench_stack(served.home, "other", OPTIONS, folder=tmp_path, command=[], report=print)

    def test_folder_in_use(self, served: Lab, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="the folder is not empty"):
            open_folder(served.home, "pdkit", "random", tmp_path)
        with pytest.raises(UsageError, match="File exists"):
            open_folder(served.home, "pdkit", "random", tmp_path / "file")


class TestTrace:
    LINES = (
        {"timestamp": 0, "input_length": 80, "output_length": 2},
        {"timestamp": 100, "input_length": 90, "output_length": 2},
    )

    def options(self, folder: Path) -> dict[str, Any]:
        file = folder / "trace.jsonl"
        file.write_text("\n".join(map(json.dumps, self.LINES)))
        return {"workload": WorkloadOptions("trace", file=file), "repeats": 1, "requests": None}

    def test_is_sent_at_its_times(self, bench: Bench, tmp_path: Path) -> None:
        (repeat,) = bench(**self.options(tmp_path)).repeats
        assert (repeat.sent, repeat.concurrency) == (2, None)
        first, second = read_requests(tmp_path)
        assert second.arrival_s - first.arrival_s >= 0.09

    def test_may_be_sent_at_the_rates_of_a_search(self, bench: Bench, tmp_path: Path) -> None:
        search = {"slo": Slo(ttft_s=100), "find_rate": True, "steps": 1}
        result = bench(**self.options(tmp_path), **search)
        assert result.rate_search is not None
        assert [one.rate for one in result.repeats] == [
            one.rate for one in result.rate_search.steps
        ]

    def test_may_be_sent_in_a_closed_loop(self, bench: Bench, tmp_path: Path) -> None:
        (repeat,) = bench(**self.options(tmp_path), concurrency=1).repeats
        assert (repeat.sent, repeat.concurrency, repeat.rate) == (2, 1, None)


def test_folder_names_the_run(served: Lab) -> None:
    folder = open_folder(served.home, "pdkit", "random")
    assert folder.parent == served.home.bench
    assert folder.name.endswith("Z-1p2d-random")
    folder.rmdir()


def test_a_part_of_a_file_is_as_much_as_of_other_workloads(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": [n] * 9}) for n in range(1, 31)))
    workload = WorkloadOptions("dataset", file=file, as_is=True, output_tokens=TokenRange(1, 1))
    asked = {"workload": workload, "requests": None, "repeats": 1, "warmup": 0}
    assert bench(**asked, whole_file=False).repeats[0].sent == 24, "eight for each of three engines"
    (tmp_path / "requests.jsonl").unlink()
    assert bench(**asked).repeats[0].sent == 30
    (tmp_path / "requests.jsonl").unlink()
    search = {"slo": Slo(ttft_s=100), "find_rate": True, "rate": 200.0, "steps": 1, "pass_s": 0.1}
    assert bench(**asked, **search).repeats[0].sent == 20


def test_dataset_of_token_ids(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"prompt": [1] * 100, "output_tokens": 2}) + "\n")
    workload = WorkloadOptions("dataset", file=file, as_is=True)
    result = bench(workload=workload, repeats=1, warmup=0)
    assert result.repeats[0].sent == 1
    assert [line.input_tokens for line in read_requests(tmp_path)] == [100]
