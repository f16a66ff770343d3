"""One benchmark run: warm-up, repeats or a search for the highest rate, and what they gave."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from deploy.benchmark.break_even import speeds_at_ends
from deploy.benchmark.dataset import left_out
from deploy.benchmark.results import Repeat, Result, Slo, append_requests, write_result
from deploy.benchmark.slo import RateFinder
from deploy.benchmark.statistics import LEAST_REPEATS, MOST_REPEATS, noise, repeats_for
from deploy.benchmark.summary import said
from deploy.errors import MachineUnfit, StackUnhealthy, StateError, UsageError
from deploy.planning.break_even import LastBenchmark, break_even_tokens
from deploy.runtime.engine_api import ApiError
from deploy.runtime.home import Home, write_private
from deploy.runtime.last_measured import key_of, read_measured
from deploy.workflows.bench.facts import (
    machine_facts,
    model_facts,
    stack_facts,
    up_extra_s,
    versions,
)
from deploy.workflows.bench.hop import measure_hop, measure_throughput
from deploy.workflows.bench.passes import BenchOptions, BenchSession, Pass
from deploy.workflows.check.run import require_answers
from deploy.workflows.prepare import Report
from deploy.workflows.running import require_running, require_stack

# A line of requests.jsonl: a gap takes up to ten characters.
_LINE_BYTES, _GAP_BYTES, _SPARE_BYTES = 300, 10, 1 << 20


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
        StateError: there is no such stack, or it has engines on other hosts.
        UsageError: the options do not fit the stack, or the workload's file is broken.
        StackUnhealthy: a service does not answer, or no request was answered.
        MachineUnfit: there is no room for the result.
    """
    running = require_stack(home, name)
    if running.stack.remote:
        raise StateError(
            f"the stack '{name}' uses engines of other hosts, whose GPUs a benchmark would not "
            "count",
            hint="measure a stack of one host, or load this one with a tool of your own",
        )
    require_running(running)
    require_answers(running)
    with _understood(name):
        bench = BenchSession(running, options, report)
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
            workload=options.workload.described(skipped_lines=len(bench.skipped_lines)),
            slo=options.slo,
            repeats=[],
            up_extra_s=up_extra_s(running),
            interrupted=True,
        )
        if bench.skipped_lines:
            report(f"warning: {left_out(options.workload.file, bench.skipped_lines)}")
        finder = _finder(options)
        for one in _found(bench, finder) if finder else _repeated(bench):
            result = result.model_copy(update={"repeats": [*result.repeats, one.repeat]})
            append_requests(folder, one.load.records)
            write_result(folder, result)
        once = _once(bench)
    search = finder.found() if finder else None
    result = result.model_copy(update={"interrupted": False, "rate_search": search, **once})
    write_result(folder, result)
    if options.one_user_requests:  # of a sweep, in the first round only
        keep_break_even(home, result, folder)
    return result


def _once(bench: BenchSession) -> dict[str, object]:
    """Measure one user and what the router costs, and return them as fields of the result."""
    stack, options = (bench.running, bench.target, bench.tokens), bench.options
    return {
        "one_user": bench.one_user(),
        "hop_s": measure_hop(*stack, options.hop_requests),
        "router_throughput": measure_throughput(*stack, options.router_requests),
    }


def _repeated(bench: BenchSession) -> Iterator[Pass]:
    """Yield the repeats, each with other lengths and arrivals."""
    options, warmup_s = bench.options, bench.warm_up().seconds
    wanted = options.repeats if options.within is None else LEAST_REPEATS
    done: list[Repeat] = []
    began = time.monotonic()
    while len(done) < wanted:
        index = len(done)
        left = (time.monotonic() - began) / index * (wanted - index) if index else None
        about = f", about {left:.0f} s left" if left is not None else ""
        bench.report(f"repeat {index + 1} of {wanted}{about}")
        seed = f"{options.seed} {index}"
        one = bench.one_pass(index, rate=options.rate, seed=seed, warmup_s=warmup_s)
        bench.report(f"  {said(one.repeat)}")
        yield one
        warmup_s = 0.0
        done.append(one.repeat)
        if options.within is not None and len(done) == LEAST_REPEATS:
            wanted = _enough(done, options.within)


def _enough(pilot: Sequence[Repeat], within: float) -> int:
    """Return the repeats that TTFT and throughput need, by the noise of the first ones."""
    ttft = [one.ttft_s.p50 for one in pilot if one.ttft_s]
    rates = [one.requests_per_s for one in pilot]
    known = [values for values in (ttft, rates) if values and min(values) > 0]
    return repeats_for(max(map(noise, known), default=0.0), within)


def _finder(options: BenchOptions) -> RateFinder | None:
    if not options.find_rate:
        return None
    return RateFinder(options.rate or 1.0, options.slo_share, options.steps)


def _found(bench: BenchSession, finder: RateFinder) -> Iterator[Pass]:
    """Yield a pass for each rate that the search tries, all with the same seed."""
    warm, slo = bench.warm_up(), bench.options.slo or Slo()
    finder.start = bench.options.rate or warm.rate or finder.start
    warmup_s = warm.seconds
    while (rate := finder.next_rate()) is not None:
        index = len(finder.steps)
        bench.report(f"step {index + 1} of at most {finder.most_steps}: {rate:.2f} requests/s")
        one = bench.one_pass(index, rate=rate, seed=str(bench.options.seed), warmup_s=warmup_s)
        step = finder.add(rate, one.load.records, slo)
        held = "holds" if step.held else "does not hold"
        bench.report(f"  {said(one.repeat)}: {held}")
        yield one
        warmup_s = 0.0


def _expected_bytes(bench: BenchSession) -> int:
    options = bench.options
    repeats = options.repeats if options.within is None else MOST_REPEATS
    passes = options.steps if options.find_rate else repeats
    # The rates of a search are unknown; each is at most twice the one before.
    requests = bench.requests_at(options.rate) * passes
    answer = options.workload.output_tokens.high
    return _SPARE_BYTES + requests * (_LINE_BYTES + _GAP_BYTES * answer)


@contextmanager
def _understood(name: str) -> Iterator[None]:
    """Turn an ApiError of an engine into StackUnhealthy."""
    try:
        yield
    except ApiError as exc:
        raise StackUnhealthy(
            f"an engine stopped answering during the benchmark: {exc}",
            hint=f"deploy up --resume --name {name}",
        ) from exc


def keep_break_even(home: Home, result: Result, folder: Path) -> None:
    """Store the break-even of a result, if it has one, at its lowest and highest load."""
    speeds = speeds_at_ends(result)
    if not speeds:
        return
    gpu = result.machine.gpus[0] if result.machine.gpus else ""
    key = key_of(result.model.name, result.machine.processor, gpu)
    tokens = {load: break_even_tokens(one) for load, one in speeds.items()}
    found = LastBenchmark(tokens, result.started, str(folder))
    known = {name: asdict(one) for name, one in {**read_measured(home), key: found}.items()}
    write_private(home.measured_file, json.dumps(known, indent=1))


def open_folder(home: Home, name: str, workload: str, out: Path | None = None) -> Path:
    """Make and return the folder of a result of a stack.

    Raises:
        StateError: there is no such stack.
        UsageError: `out` is not an empty folder, or cannot be made.
    """
    topology = require_stack(home, name).prepared.plan.topology
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    folder = (out or home.bench / f"{stamp}-{topology}-{workload}").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: the folder is not empty", hint="name a new one")
    except OSError as exc:
        raise UsageError(f"--out {folder}: {exc.strerror}", hint="name another folder") from exc
    return folder


def require_space(folder: Path, needed_bytes: int) -> None:
    """Check that a result will fit on its disk.

    Raises:
        MachineUnfit: it will not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise MachineUnfit(
            f"{free / 2**20:.0f} MiB are free in {folder}, and the result may take "
            f"{needed_bytes / 2**20:.0f} MiB",
            hint="free some space, or --out DIR on another disk",
        )
