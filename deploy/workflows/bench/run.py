"""One benchmark run: warm-up, repeats or a search for the highest rate, and what they gave."""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from deploy.benchmark.dataset import read_lines
from deploy.benchmark.load import Load, Target, run_load
from deploy.benchmark.results import (
    Repeat,
    RequestRecord,
    Result,
    Slo,
    Usage,
    append_requests,
    write_result,
)
from deploy.benchmark.slo import RateFinder
from deploy.benchmark.summary import said, summary
from deploy.benchmark.workloads import FILE_WORKLOADS, Line, Source, WorkloadOptions
from deploy.errors import StackUnhealthy, UsageError
from deploy.runtime.engine_api import ApiError, bearer
from deploy.runtime.home import Home
from deploy.runtime.usage import UsageMeter
from deploy.workflows.bench.counters import (
    hit_tokens,
    read_pages,
    redis_path,
    settled_pages,
    stages,
)
from deploy.workflows.bench.facts import machine_facts, model_facts, stack_facts, versions
from deploy.workflows.bench.folder import require_space
from deploy.workflows.bench.hop import measure_hop
from deploy.workflows.bench.last import keep_break_even
from deploy.workflows.check.session import require_answers
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack, require_running, require_stack

GENERATOR = "bench"  # its name among the services whose CPU time is kept
_LETTERS = string.ascii_letters + string.digits + string.punctuation + " "
_LEAST_REQUESTS = 20
_PROGRESS_S = 5.0
# A line of requests.jsonl: a gap takes up to ten characters.
_LINE_BYTES, _GAP_BYTES, _SPARE_BYTES = 300, 10, 1 << 20
# From there on the generator may be what is measured.
_BUSY_CORE, _LATE_S = 0.7, 0.1


@dataclass(frozen=True)
class BenchOptions:
    """What of a benchmark can be asked for.

    Attributes:
        rate: requests per second, with Poisson arrivals; None for a closed loop.
        concurrency: requests in flight in a closed loop; None means one per engine.
        requests: of a pass; None means enough for a few seconds.
        warmup: requests before the first repeat; None means two per engine.
        slo_share: the share of requests that must keep the SLO for a rate to hold it.
        find_rate: search the highest rate that holds the SLO, beginning with `rate`.
        steps: rates that the search tries at most.
        timeout_s: for a whole answer.
        hop_requests: by which the router's own time is measured.
        pass_s: seconds of load at a rate, about.
    """

    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    rate: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    repeats: int = 3
    warmup: int | None = None
    seed: int = 0
    slo: Slo | None = None
    slo_share: float = 0.9
    find_rate: bool = False
    steps: int = 10
    timeout_s: float = 120.0
    hop_requests: int = 20
    pass_s: float = 15.0


@dataclass(frozen=True)
class _Pass:
    """One measured pass: its load, and what the engines counted meanwhile."""

    repeat: Repeat
    load: Load


class _Bench:
    """A run's conversation with a stack."""

    def __init__(self, running: RunningStack, options: BenchOptions, report: Report) -> None:
        self.running, self.options, self.report = running, options, report
        plan = running.prepared.plan
        with running.api(running.stack.service(plan.engines[0].name)) as api:
            self.context = api.max_model_len()
            self.vllm = api.version()
            tokens = sorted(set(api.tokenize(plan.model.served_name, _LETTERS)))
        lines: list[Line] = []
        self.skipped_lines = 0
        if options.workload.name in FILE_WORKLOADS:
            lines, self.skipped_lines = read_lines(options.workload, self.context)
        _require_room(options.workload, self.context)
        self.source = Source(options.workload, tokens, lines)
        self.tokens = tokens
        self.lines = len(lines)
        front = running.stack.front
        self.target = Target(
            front.url,
            plan.model.served_name,
            options.timeout_s,
            bearer(running.key(front)),
        )

    @property
    def engines(self) -> int:
        return len(self.running.prepared.plan.engines)

    @property
    def is_replay(self) -> bool:
        """Whether a trace sets the arrivals."""
        options = self.options
        return options.workload.name == "trace" and options.rate is options.concurrency is None

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
        elif self.lines:
            wanted = self.lines
        elif rate:
            wanted = max(_LEAST_REQUESTS, round(rate * self.options.pass_s))
        else:
            wanted = max(_LEAST_REQUESTS, 8 * (self.concurrency or 1))
        return self.source.requests(wanted)

    def warm_up(self) -> float:
        """Send the first requests, which are slower than all later ones; return the seconds."""
        wanted = 2 * self.engines if self.options.warmup is None else self.options.warmup
        if not wanted:
            return 0.0
        conversations = self.source.one_pass(wanted, seed="warm-up", rate=None)
        self.report(f"warming up with {sum(len(one.turns) for one in conversations)} requests")
        load = run_load(self.target, conversations, concurrency=self.engines)
        _require_an_answer(load.records, self.running.stack.name)
        return load.duration_s

    def one_pass(self, index: int, *, rate: float | None, seed: str, warmup_s: float) -> _Pass:
        """Load the stack once, and read what everybody counted meanwhile."""
        conversations = self.source.one_pass(self.requests_at(rate), seed=seed, rate=rate)
        total = sum(len(one.turns) for one in conversations)
        before = read_pages(self.running)
        with UsageMeter(_pids(self.running)) as meter:
            load = run_load(
                self.target,
                conversations,
                repeat=index,
                concurrency=self.concurrency,
                on_done=self._progress(total),
            )
        answered = sum(one.error is None for one in load.records)
        after = settled_pages(self.running, before, answered)
        for line in _doubts(load):
            self.report(f"warning: {line}")
        usage = Usage(
            cpu_s={**meter.cpu_s, GENERATOR: round(load.cpu_s, 3)},
            peak_rss_bytes=meter.peak_rss_bytes,
        )
        measured = summary(load, self.options.slo, index=index)
        repeat = measured.model_copy(
            update={
                "rate": self._replayed(load) if self.is_replay else rate,
                "concurrency": self.concurrency,
                "warmup_s": round(warmup_s, 3),
                "hits": hit_tokens(self.running, before, after, load.records),
                "redis_path": redis_path(self.running, before, after),
                "usage": usage,
                "stages": stages(self.running, before, after),
            }
        )
        return _Pass(repeat, load)

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


def bench_stack(
    home: Home,
    name: str,
    options: BenchOptions,
    *,
    folder: Path,
    command: Sequence[str],
    report: Report,
) -> Result:
    """Load a running stack and keep the result in `folder`, after every repeat.

    The caller holds the locks of the stack and of benchmarks. Ctrl-C leaves the finished repeats.

    Raises:
        StateError: there is no such stack.
        UsageError: the options do not fit the stack, or the workload's file is broken.
        StackUnhealthy: a service does not answer, or no request was answered.
        MachineUnfit: there is no room for the result.
    """
    running = require_stack(home, name)
    require_running(running)
    require_answers(running)
    with _understood(name):
        bench = _Bench(running, options, report)
        require_space(folder, _expected_bytes(bench))
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        result = Result(
            started=started,
            command=list(command),
            seed=options.seed,
            machine=machine_facts(running),
            versions=versions(running, bench.vllm),
            model=model_facts(running, bench.context),
            stack=stack_facts(running),
            workload=options.workload.described(skipped_lines=bench.skipped_lines),
            slo=options.slo,
            repeats=[],
            interrupted=True,
        )
        if bench.skipped_lines:
            report(f"warning: {bench.skipped_lines} lines of {options.workload.file} left out")
        finder = _finder(options)
        for one in _found(bench, finder) if finder else _repeated(bench):
            result = result.model_copy(update={"repeats": [*result.repeats, one.repeat]})
            append_requests(folder, one.load.records)
            write_result(folder, result)
        hop = measure_hop(running, bench.target, bench.tokens, options.hop_requests)
    search = finder.found(options.seed) if finder else None
    done = {"interrupted": False, "rate_search": search, "hop_s": hop}
    result = result.model_copy(update=done)
    write_result(folder, result)
    keep_break_even(home, result, folder)
    return result


def _repeated(bench: _Bench) -> Iterator[_Pass]:
    """Yield the repeats, each with other lengths and arrivals."""
    options, warmup_s = bench.options, bench.warm_up()
    began = time.monotonic()
    for index in range(options.repeats):
        left = (time.monotonic() - began) / index * (options.repeats - index) if index else None
        about = f", about {left:.0f} s left" if left is not None else ""
        bench.report(f"repeat {index + 1} of {options.repeats}{about}")
        seed = f"{options.seed} {index}"
        one = bench.one_pass(index, rate=options.rate, seed=seed, warmup_s=warmup_s)
        bench.report(f"  {said(one.repeat)}")
        yield one
        warmup_s = 0.0


def _finder(options: BenchOptions) -> RateFinder | None:
    if not options.find_rate:
        return None
    return RateFinder(options.rate or 1.0, options.slo_share, options.steps)


def _found(bench: _Bench, finder: RateFinder) -> Iterator[_Pass]:
    """Yield a pass for each rate that the search tries, all with the same seed."""
    warmup_s, slo = bench.warm_up(), bench.options.slo or Slo()
    while (rate := finder.next_rate()) is not None:
        index = len(finder.steps)
        bench.report(f"step {index + 1} of at most {finder.most_steps}: {rate:.2f} requests/s")
        one = bench.one_pass(index, rate=rate, seed=str(bench.options.seed), warmup_s=warmup_s)
        step = finder.add(rate, one.load.records, slo)
        held = "holds" if step.held else "does not hold"
        bench.report(f"  {said(one.repeat)}: {held}")
        yield one
        warmup_s = 0.0


def _doubts(load: Load) -> Iterator[str]:
    """Yield why the generator itself may blur the numbers."""
    if load.cpu_s > _BUSY_CORE * load.duration_s:
        share = 100 * load.cpu_s / load.duration_s
        yield f"the load generator used {share:.0f} % of a core; latencies may be its own"
    if load.late_s > _LATE_S:
        yield f"a request was sent {load.late_s:.2f} s late: the machine has no core to spare"


def _require_room(workload: WorkloadOptions, context: int) -> None:
    if workload.longest > context:
        raise UsageError(
            f"--workload {workload.name}: up to {workload.longest} tokens do not fit the model's "
            f"context of {context}",
            hint="lower --input-tokens, --output-tokens, --prefix-tokens or --turns",
        )


def _require_an_answer(records: Sequence[RequestRecord], name: str) -> None:
    if records and all(one.error is not None for one in records):
        raise StackUnhealthy(
            f"no request of the warm-up was answered: {records[0].error}",
            hint=f"deploy check --name {name}",
        )


def _pids(running: RunningStack) -> dict[str, int]:
    records = running.state.services
    return {name: running.launcher.pid(record) for name, record in records.items()}


def _expected_bytes(bench: _Bench) -> int:
    options = bench.options
    passes = options.steps if options.find_rate else options.repeats
    # Of a search nobody knows the rates; each doubles the one before at most.
    requests = bench.requests_at(options.rate) * passes
    answer = options.workload.output_tokens.high
    return _SPARE_BYTES + requests * (_LINE_BYTES + _GAP_BYTES * answer)


@contextmanager
def _understood(name: str) -> Iterator[None]:
    """Turn an engine's silence into an error of the stack."""
    try:
        yield
    except ApiError as exc:
        raise StackUnhealthy(
            f"an engine stopped answering during the benchmark: {exc}",
            hint=f"deploy up --resume --name {name}",
        ) from exc
