"""The report's section on the prompt length from which loading KV pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from deploy.benchmark.break_even import speeds_at_ends
from deploy.benchmark.report.cells import number, short, table
from deploy.benchmark.report.points import StackRuns
from deploy.planning.break_even import Speeds, break_even_tokens, changes, needed_gb_s


def break_even_section(runs: Sequence[StackRuns]) -> Iterator[str]:
    """Yield each stack's break-even, and what would move that of the first one."""
    found = [(run, speeds) for run in runs if (speeds := speeds_at_ends(run.result))]
    if not found:
        return
    yield "<h2>Break-even of loading KV</h2>"
    yield (
        '<p class="soft">The shortest prompt whose KV is loaded from Redis faster than an engine '
        "computes it, from the speeds measured with one request at a time and at each stack's "
        "highest load.</p>"
    )
    header = ("stack", "load", "break-even", "prefill", "KV computed", "KV loaded", "lookup")
    rows = [
        _speed_row(run.name, load, one) for run, speeds in found for load, one in speeds.items()
    ]
    yield table(header, rows, "loads")
    run, speeds = found[0]
    yield f"<h3>What would move it: {escape(run.name)}, estimated</h3>"
    loads = tuple(map(short, speeds))
    yield table(("change", *loads), _moves(speeds, run.result.stack.shards))
    yield (
        '<p class="soft">What another Redis would have to deliver to an engine, so that loading a '
        "prompt of this length pays.</p>"
    )
    yield table(("prompt", *loads), _needs(speeds))


def _moves(speeds: Mapping[str, Speeds], shards: int) -> Iterator[Sequence[str]]:
    by_load = [changes(one, shards) for one in speeds.values()]
    for same in zip(*by_load, strict=True):
        yield same[0].what, *(_tokens(break_even_tokens(one.speeds)) for one in same)


def _needs(speeds: Mapping[str, Speeds]) -> Iterator[Sequence[str]]:
    chunk = next(iter(speeds.values())).chunk
    for tokens in (chunk, 4 * chunk):
        needed = [needed_gb_s(one, tokens) for one in speeds.values()]
        yield f"{tokens:,} tokens", *("none can" if one is None else _over(one) for one in needed)
    yield "very long", *(_over(one.computed_gb_s) for one in speeds.values())
    yield "this Redis delivered", *(f"{number(one.load_gb_s)} GB/s" for one in speeds.values())


def _over(speed_gb_s: float) -> str:
    return f"over {number(speed_gb_s)} GB/s"


def _speed_row(name: str, load: str, speeds: Speeds) -> Sequence[str]:
    return (
        name,
        short(load),
        _tokens(break_even_tokens(speeds)),
        f"{speeds.prefill_tokens_s:,.0f} tokens/s",
        f"{speeds.computed_gb_s:.3g} GB/s",
        f"{speeds.load_gb_s:.3g} GB/s",
        f"{1e3 * speeds.lookup_s:.3g} ms",
    )


def _tokens(count: int | None) -> str:
    return "never: computing is faster" if count is None else f"{count:,} tokens"
