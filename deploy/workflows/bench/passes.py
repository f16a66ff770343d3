"""Passes of load over a stack, and what was counted meanwhile."""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deploy.benchmark.dataset import fitting_lines
from deploy.benchmark.load import Load, LoadTarget, run_load
from deploy.benchmark.results import GpuUse, Repeat, RequestRecord, Slo, Usage
from deploy.benchmark.summary import summary
from deploy.benchmark.workloads import Conversation, PassSource, WorkloadOptions
from deploy.errors import StackUnhealthy
from deploy.runtime.engine_api import bearer
from deploy.runtime.gpu_meter import GpuMeter
from deploy.runtime.usage import UsageMeter
from deploy.workflows.bench.counters import (
    connector_shares,
    hit_tokens,
    read_pages,
    redis_path,
    settled_pages,
    stages,
)
from deploy.workflows.bench.facts import used_gpus
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack

GENERATOR = "bench"  # its name among the services whose CPU time is kept
_LETTERS = string.ascii_letters + string.digits + string.punctuation + " "
_LEAST_REQUESTS = 20
_PROGRESS_S = 5.0
# Beyond these, the generator itself may be what is measured.
_BUSY_CORE, _LATE_S = 0.7, 0.1


@dataclass(frozen=True)
class BenchOptions:
    """The options of a benchmark.

    Attributes:
        rate: requests per second, with Poisson arrivals; None for a closed loop.
        concurrency: requests in flight in a closed loop; None means one per engine.
        requests: of a pass; None means enough for a few seconds, or all of a file.
        whole_file: a pass has all lines of a workload's file; else, and while a rate is searched,
            as many as any other workload has requests.
        within: choose how many repeats, or rounds of a sweep, from the noise of the first five, so
            that the result is about ± this share of itself; None leaves their number as it is.
        warmup: requests before the first repeat; None means two per engine.
        slo_share: the share of requests that must keep the SLO for a rate to hold it.
        find_rate: search the highest rate that holds the SLO, beginning with `rate`; without one,
            with the rate at which the warm-up was answered.
        steps: rates that the search tries at most.
        timeout_s: for a whole answer.
        hop_requests: by which the router's own time is measured.
        router_requests: by which its throughput is measured, in each round.
        one_user_requests: sent one at a time, for the break-even of a single user.
        pass_s: seconds of load at a rate, about.
    """

    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    rate: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    whole_file: bool = True
    repeats: int = 3
    warmup: int | None = None
    seed: int = 0
    slo: Slo | None = None
    slo_share: float = 0.9
    find_rate: bool = False
    steps: int = 10
    timeout_s: float = 120.0
    hop_requests: int = 20
    router_requests: int = 40
    one_user_requests: int = 8
    pass_s: float = 15.0
    within: float | None = None


@dataclass(frozen=True)
class WarmUp:
    """How long the warm-up took, and how many of its requests a second were answered."""

    seconds: float = 0.0
    rate: float | None = None


@dataclass(frozen=True)
class Pass:
    """One measured pass: its load, and what the engines counted meanwhile."""

    repeat: Repeat
    load: Load


class BenchSession:
    """A stack under load, as a benchmark run uses it."""

    def __init__(self, running: RunningStack, options: BenchOptions, report: Report) -> None:
        self.running, self.options, self.report = running, options, report
        plan = running.prepared.plan
        with running.api(running.stack.service(plan.engines[0].name)) as api:
            self.context = api.max_model_len()
            self.vllm = api.version()
            tokens = sorted(set(api.tokenize(plan.model.served_name, _LETTERS)))
        lines, self.skipped_lines = fitting_lines(options.workload, self.context)
        self.source = PassSource(options.workload, tokens, lines)
        self.tokens = tokens
        self.lines = len(lines)
        front = running.stack.front
        self.target = LoadTarget(
            front.url,
            plan.model.served_name,
            options.timeout_s,
            bearer(running.key(front)),
        )

    @property
    def engines(self) -> int:
        """The number of engines."""
        return len(self.running.prepared.plan.engines)

    @property
    def is_replay(self) -> bool:
        """Whether a trace sets the arrivals."""
        options = self.options
        chosen = options.find_rate or options.rate or options.concurrency
        return options.workload.name == "trace" and not chosen

    @property
    def concurrency(self) -> int | None:
        """Requests in flight; None in an open loop."""
        if self.options.rate is not None or self.is_replay or self.options.find_rate:
            return None
        return self.options.concurrency or self.engines

    def requests_at(self, rate: float | None) -> int:
        """Return the requests of a pass."""
        if self.options.requests:
            wanted = self.options.requests
        elif self.lines and self.options.whole_file and not self.options.find_rate:
            wanted = self.lines
        elif rate:
            wanted = max(_LEAST_REQUESTS, round(rate * self.options.pass_s))
        else:
            wanted = max(_LEAST_REQUESTS, 8 * (self.concurrency or 1))
        return self.source.requests(wanted)

    def warm_up(self) -> WarmUp:
        """Send the first requests, which are slower than all later ones."""
        wanted = 2 * self.engines if self.options.warmup is None else self.options.warmup
        if not wanted:
            return WarmUp()
        conversations = self.source.one_pass(wanted, seed="warm-up", rate=None)
        self.report(f"warming up with {sum(len(one.turns) for one in conversations)} requests")
        load = run_load(self.target, conversations, concurrency=self.engines)
        _require_an_answer(load.records, self.running.stack.name)
        answered = sum(one.error is None for one in load.records)
        return WarmUp(load.duration_s, answered / load.duration_s)

    def one_pass(self, index: int, *, rate: float | None, seed: str, warmup_s: float) -> Pass:
        """Load the stack once, and read what all services counted meanwhile."""
        conversations = self.source.one_pass(self.requests_at(rate), seed=seed, rate=rate)
        measured = self._measured(conversations, index, self.concurrency)
        offered = {
            "rate": self._replayed(measured.load) if self.is_replay else rate,
            "warmup_s": round(warmup_s, 3),
        }
        return Pass(measured.repeat.model_copy(update=offered), measured.load)

    def one_user(self) -> Repeat | None:
        """Send a few requests one at a time; None where that tells nothing new."""
        wanted = self.options.one_user_requests
        if not wanted or self.concurrency == 1 or not self.running.prepared.plan.shares_kv:
            return None
        self.report("one request at a time")
        seed = f"{self.options.seed} one user"
        conversations = self.source.one_pass(wanted, seed=seed, rate=None)
        return self._measured(conversations, 0, 1).repeat

    def _measured(
        self, conversations: Sequence[Conversation], index: int, concurrency: int | None
    ) -> Pass:
        total = sum(len(one.turns) for one in conversations)
        before = read_pages(self.running)
        gpus = GpuMeter(used_gpus(self.running))
        with UsageMeter(_pids(self.running)) as meter, gpus:
            load = run_load(
                self.target,
                conversations,
                repeat=index,
                concurrency=concurrency,
                on_done=self._progress(total),
            )
        answered = sum(one.error is None for one in load.records)
        after = settled_pages(self.running, before, answered)
        for line in _doubts(load, gpus):
            self.report(f"warning: {line}")
        usage = Usage(
            cpu_s={**meter.cpu_s, GENERATOR: round(load.cpu_s, 3)},
            peak_rss_bytes=meter.peak_rss_bytes,
            gpu=_gpu_use(gpus) or None,
        )
        counted = {
            "concurrency": concurrency,
            "hits": hit_tokens(self.running, before, after, load.records),
            "redis_path": redis_path(self.running, before, after),
            "usage": usage,
            "stages": stages(self.running, before, after),
            "connector": connector_shares(self.running, before, after),
        }
        repeat = summary(load, self.options.slo, index=index).model_copy(update=counted)
        return Pass(repeat, load)

    def _replayed(self, load: Load) -> float | None:
        span = max(record.arrival_s for record in load.records)
        return round(len(load.records) / span, 4) if span else None

    def _progress(self, total: int) -> Callable[[int], None]:
        began = told = time.monotonic()

        def done(count: int) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= _PROGRESS_S and count < total:
                told = now
                left = (now - began) * (total - count) / count
                self.report(f"  {count} of {total} requests, about {left:.0f} s left")

        return done


def _gpu_use(gpus: GpuMeter) -> dict[str, GpuUse]:
    return {
        str(index): GpuUse(
            utilization=None if one.utilization is None else round(one.utilization, 4),
            peak_memory_bytes=one.peak_bytes,
        )
        for index, one in gpus.measured.items()
    }


def _doubts(load: Load, gpus: GpuMeter) -> Iterator[str]:
    """Yield warnings: the generator itself may distort the numbers, or some are missing."""
    if load.cpu_s > _BUSY_CORE * load.duration_s:
        share = 100 * load.cpu_s / load.duration_s
        yield f"the load generator used {share:.0f} % of a core; it may add to latencies"
    if load.late_s > _LATE_S:
        yield f"a request was sent {load.late_s:.2f} s late: the machine has no free core"
    if gpus.trouble:
        yield f"GPU use is partly or wholly unknown: {gpus.trouble}"


def _require_an_answer(records: Sequence[RequestRecord], name: str) -> None:
    if records and all(one.error is not None for one in records):
        raise StackUnhealthy(
            f"no request of the warm-up was answered: {records[0].error}",
            hint=f"deploy check --name {name}",
        )


def _pids(running: RunningStack) -> dict[str, int]:
    records = running.state.services
    return {name: running.launcher.pid(record) for name, record in records.items()}
