"""The options that several commands share, written once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.errors import HELP, UsageError

if TYPE_CHECKING:
    from deploy.benchmark.workloads import WorkloadOptions

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Stack name (default: the one in deploy.yaml, else pdkit)."),
]
Inventory = Annotated[
    Path | None,
    typer.Option(
        "--inventory", help="Plan for the machine described in this file instead of this one."
    ),
]
File = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="Stack file (default: ./deploy.yaml if it exists)."),
]


_Gpus = Annotated[
    int | None,
    typer.Option(
        help="Number of GPUs to use; with --vendor cpu, number of engines (default: what the "
        "topology needs)."
    ),
]
_Vendor = Annotated[
    str | None,
    typer.Option(help="auto, cuda, rocm or cpu (default: auto, the GPUs found, else cpu)."),
]
_Runtime = Annotated[
    str | None,
    typer.Option(
        help="auto, compose (containers) or process (default: auto, compose if Docker answers)."
    ),
]
_Image = Annotated[
    str | None,
    typer.Option(
        help="Engine image: a profile from `deploy images list` or an image reference "
        "(default: the vendor's profile)."
    ),
]
_AllowUntested = Annotated[
    bool | None,
    typer.Option(
        "--allow-untested/--no-allow-untested",
        help="Allow an untested pair of vLLM and LMCache versions (default: refuse it).",
    ),
]
_Topology = Annotated[
    str | None,
    typer.Option(
        help="Number of producers (prefill) and consumers (decode), such as 1p3d; or of aggregated "
        "engines that do both, such as 4a, or 4a+redis to share KV (default: --gpus split evenly, "
        "else 1p1d)."
    ),
]
_Producers = Annotated[
    int | None,
    typer.Option(help="Number of producers (prefill engines), instead of --topology (default: 1)."),
]
_Consumers = Annotated[
    int | None,
    typer.Option(help="Number of consumers (decode engines), instead of --topology (default: 1)."),
]
_TensorParallel = Annotated[
    int | None, typer.Option(help="Tensor-parallel size of every engine (default: 1).")
]
_Model = Annotated[
    str | None,
    typer.Option(
        help="Model folder, Hugging Face id, or tiny, which needs no download (default: "
        "Qwen/Qwen3-0.6B on GPUs, tiny on CPUs)."
    ),
]
_Connector = Annotated[
    str | None,
    typer.Option(
        help="How engines share KV: lmcache (default), or lmcache-mp, through LMCache's server."
    ),
]
_Layerwise = Annotated[
    bool | None,
    typer.Option(
        "--layerwise/--no-layerwise",
        help="Move KV layer by layer while the engine computes (default: off).",
    ),
]
_SaveDecodeCache = Annotated[
    bool | None,
    typer.Option(
        "--save-decode-cache/--no-save-decode-cache",
        help="Also store the KV of generated tokens (default: off).",
    ),
]
_StackName = Annotated[str | None, typer.Option(help="Stack name (default: pdkit).")]
_Port = Annotated[
    int | None,
    typer.Option(help="Port for clients; other services use those above it (default: 8000)."),
]
_Bind = Annotated[
    str | None,
    typer.Option(
        help="IP address for clients; everything else stays on loopback (default: 127.0.0.1)."
    ),
]
_ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the API key that clients must send (default: no key)."),
]
_AllowKeyless = Annotated[
    bool | None,
    typer.Option(
        "--allow-keyless/--no-allow-keyless",
        help="Let --bind accept other machines without --api-key-file (default: refuse that).",
    ),
]

_Monitoring = Annotated[
    bool | None,
    typer.Option(
        "--monitoring/--no-monitoring",
        help="Also run Prometheus with alert rules, and Grafana, on loopback (default: off).",
    ),
]
InCluster = Annotated[
    bool,
    typer.Option(
        "--kubernetes", help="Use the exported stack in kubectl's cluster instead of one here."
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context", help="With --kubernetes: context of kubectl (default: the current one)."
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", help="With --kubernetes: namespace (default: kubectl's)."),
]
ExportFolder = Annotated[
    Path | None,
    typer.Argument(
        help="With --kubernetes: folder of the export, or of its check for one vendor, whose "
        "namespace is used (default: repeat the check that the cluster has)."
    ),
]
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


def _stack_options(  # noqa: PLR0913 - one parameter an option of the contract
    *,
    file: File = None,
    gpus: _Gpus = None,
    vendor: _Vendor = None,
    runtime: _Runtime = None,
    image: _Image = None,
    allow_untested: _AllowUntested = None,
    topology: _Topology = None,
    producers: _Producers = None,
    consumers: _Consumers = None,
    tp: _TensorParallel = None,
    model: _Model = None,
    connector: _Connector = None,
    layerwise: _Layerwise = None,
    save_decode_cache: _SaveDecodeCache = None,
    name: _StackName = None,
    port: _Port = None,
    bind: _Bind = None,
    api_key_file: _ApiKeyFile = None,
    allow_keyless: _AllowKeyless = None,
    monitoring: _Monitoring = None,
) -> None:
    """Hold the signature that `takes_stack_options` gives to commands."""


def stack_option_names() -> tuple[str, ...]:
    """Return the names of the options that `takes_stack_options` gives."""
    return tuple(inspect.signature(_stack_options).parameters)


@functools.cache
def _shared() -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_stack_options, eval_str=True).parameters


def takes_stack_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all stack options; it gets them as `file` and a dict `flags`."""
    shared = _shared()
    own = {
        name: parameter
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name not in ("file", "flags")
    }

    @functools.wraps(command)
    def with_flags(**given: Any) -> Any:
        file = given.pop("file")
        flags = {name: given.pop(name) for name in shared if name != "file"}
        return command(file=file, flags=flags, **given)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (*shared.values(), *own.values())
    ]
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags


def require_fitting(
    *, kubernetes: bool, needs: Mapping[str, object], refuses: Mapping[str, object]
) -> None:
    """Refuse options that are only for a cluster, or only for this machine.

    Args:
        needs: option → its value, for options that need --kubernetes.
        refuses: those that do not go with it.
    """
    given = [option for option, value in (refuses if kubernetes else needs).items() if value]
    if given:
        how = "cannot be used with" if kubernetes else "needs"
        raise UsageError(f"{given[0]} {how} --kubernetes", hint=HELP)


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
    """Return the workload's options; `more` are its other fields.

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
