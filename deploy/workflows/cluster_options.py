"""The options of `deploy check` for the check in a cluster, which names engines by addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import cast

from deploy.errors import UsageError
from deploy.planning.engines import DECODE, PREFILL
from deploy.planning.pairs import named_pairs
from deploy.stack.cluster.layout import workload
from deploy.stack.cluster.objects import Object
from deploy.stack.cluster.seen import role_of
from deploy.stack.service import ServiceRole, escaped

_LONGEST_BYTES = 100_000  # Linux takes no argument of 128 KiB


@dataclass(frozen=True)
class JobOptions:
    """What is checked; like `CheckOptions`, but its pairs are those of pods.

    Attributes:
        pairs: patterns such as 'producer-0:*'; none means all pairs.
        repeat: number of runs in a row.
        junit: what JUnit XML calls the stack; "" if none is wanted.
    """

    pairs: Sequence[str] = ()
    quick: bool = False
    least: float = 1.0
    prompt: str | None = None
    repeat: int = 1
    junit: str = ""


def job_arguments(options: JobOptions, there: Sequence[Object]) -> list[str]:
    """Return the arguments of the Job's program.

    Args:
        there: the stack's pods, among other objects.

    Raises:
        UsageError: a pattern names no pair of them, or the prompt is too long.
    """
    pairs = dict(_pairs(there)) if options.pairs else {}
    named = named_pairs(pairs, options.pairs, hint="deploy check --kubernetes --pairs '*:*'")
    return [
        *(f"--pairs={pair}" for pair in named),
        *(["--quick"] if options.quick else []),
        *([f"--min-hit-rate={options.least}"] if options.least < 1 else []),
        *([f"--prompt={_argument(options.prompt)}"] if options.prompt is not None else []),
        *([f"--repeat={options.repeat}"] if options.repeat > 1 else []),
        *([f"--junit={options.junit}"] if options.junit else []),
    ]


def _argument(prompt: str) -> str:
    size = len(prompt.encode())
    if size > _LONGEST_BYTES:
        raise UsageError(
            f"--prompt-file: {size} bytes; with --kubernetes, at most {_LONGEST_BYTES}",
            hint="use a shorter prompt",
        )
    return escaped(prompt)


def _pairs(there: Sequence[Object]) -> Iterator[tuple[str, str]]:
    """Yield each pair by the names of its pods, and by their addresses."""
    engines = [one for one in there if one["kind"] == "Pod" and one["status"].get("podIP")]
    for pair in permutations(engines, 2):
        producer, consumer = map(role_of, pair)
        if producer in PREFILL and consumer in DECODE:
            name = ":".join(one["metadata"]["name"] for one in pair)
            yield name, ":".join(_engine_name(one) for one in pair)


def _engine_name(pod: Object) -> str:
    """Return an engine's name as the check inside the cluster has it."""
    role = cast(ServiceRole, role_of(pod))
    return f"{workload(role)}-{pod['status']['podIP']}"
