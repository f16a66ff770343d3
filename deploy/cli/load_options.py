"""Options shared by the commands that put load on a stack: the workload and its limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.errors import UsageError

if TYPE_CHECKING:
    from deploy.benchmark.workloads import WorkloadOptions

Workload = Annotated[
    str, typer.Option(help="What to send: random, shared-prefix, multi-turn, dataset or trace.")
]
InputTokens = Annotated[
    str, typer.Option(help="Prompt length in tokens, or what each turn adds: N, or a range N-M.")
]
OutputTokens = Annotated[str, typer.Option(help="Answer length in tokens: N, or a range N-M.")]
PrefixTokens = Annotated[int, typer.Option(min=1, help="Length of shared prefixes in tokens.")]
Prefixes = Annotated[int, typer.Option(min=1, help="Number of shared prefixes.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns per conversation.")]
SkipBroken = Annotated[
    bool, typer.Option("--skip-broken", help="Leave out broken lines of the file.")
]
Seed = Annotated[int, typer.Option(help="Random seed for prompts, lengths and arrival times.")]
SloShare = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Share of requests that must be within the SLO.")
]

Within = Annotated[
    float | None,
    typer.Option(
        min=0.1, max=100.0,
        help="Repeat until results are about ± this many percent, by the noise of the first five.",
    ),
]  # fmt: skip


def chosen_by_noise(command: str, counted: str, within: float | None, count: int | None) -> None:
    """Refuse a number of repeats where it is chosen from their noise."""
    if within is not None and count is not None:
        raise UsageError(
            f"--within and {counted} cannot be used together: --within chooses the number",
            hint=f"{command} --within {within:g}",
        )


def workload_options(
    workload: str, input_tokens: str, output_tokens: str, **more: Any
) -> WorkloadOptions:
    """Return what is sent; `more` are its other fields.

    Raises:
        UsageError: there is no such workload, or a length is not N or N-M.
    """
    from deploy.benchmark.workloads import TokenRange, WorkloadOptions, known_workload

    return WorkloadOptions(
        known_workload(workload),
        TokenRange.parse("--input-tokens", input_tokens),
        TokenRange.parse("--output-tokens", output_tokens),
        **more,
    )


def require_positive(command: str, option: str, value: float | None) -> None:
    """Refuse a number that is not above 0; None means not given."""
    if value is not None and not 0 < value < math.inf:
        raise UsageError(
            f"{option} {value:g}: expected a number above 0", hint=f"{command} {option} 1"
        )
