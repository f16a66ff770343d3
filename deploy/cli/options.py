"""The options that several commands share, written once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON envelope instead of text.")]
Name = Annotated[
    str | None, typer.Option("--name", help="Which stack; else deploy.yaml's, else 'pdkit'.")
]
Inventory = Annotated[
    Path | None,
    typer.Option("--inventory", help="Plan for the machine in this file, not for this one."),
]
File = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="Stack file; ./deploy.yaml is read where there is one."),
]


def _stack_options(  # noqa: PLR0913 - one parameter an option of the contract
    *,
    file: File = None,
    gpus: Annotated[
        int | None, typer.Option(help="How many GPUs; with the cpu vendor, how many engines.")
    ] = None,
    vendor: Annotated[str | None, typer.Option(help="auto, cuda, rocm or cpu.")] = None,
    runtime: Annotated[str | None, typer.Option(help="auto, compose or process.")] = None,
    image: Annotated[
        str | None, typer.Option(help="Engine image: a profile of the catalogue, or a reference.")
    ] = None,
    allow_unproven: Annotated[
        bool | None,
        typer.Option(
            "--allow-unproven/--no-allow-unproven",
            help="Run versions that nobody has proved together.",
        ),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="Producers and consumers, such as 1p3d.")
    ] = None,
    producers: Annotated[int | None, typer.Option(help="How many prefill engines.")] = None,
    consumers: Annotated[int | None, typer.Option(help="How many decode engines.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size of every engine.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder, a hub id, or 'tiny', which needs no download.")
    ] = None,
    connector: Annotated[str | None, typer.Option(help="lmcache.")] = None,
    layerwise: Annotated[
        bool | None, typer.Option("--layerwise/--no-layerwise", help="Move KV layer by layer.")
    ] = None,
    save_decode_cache: Annotated[
        bool | None,
        typer.Option(
            "--save-decode-cache/--no-save-decode-cache", help="Store what consumers decode, too."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The stack's name.")] = None,
    port: Annotated[
        int | None, typer.Option(help="The router's port; the others follow it.")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="The router's address; all else stays on loopback.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Clients must bring the key that is in this file.")
    ] = None,
) -> None:
    """Hold the signature that `takes_stack_options` gives to commands."""


def stack_option_names() -> tuple[str, ...]:
    """Return the names of the options that `takes_stack_options` gives."""
    return tuple(inspect.signature(_stack_options).parameters)


def takes_stack_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all stack options; it gets them as `file` and a dict `flags`."""
    shared = inspect.signature(_stack_options, eval_str=True).parameters
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
