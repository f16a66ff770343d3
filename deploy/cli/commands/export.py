"""The commands that write a stack's files for a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.app import app
from deploy.cli.hints import naming_origins
from deploy.cli.options import File, Inventory, Json, takes_stack_options
from deploy.cli.result import CommandResult
from deploy.cli.shared import load_source

if TYPE_CHECKING:
    from deploy.workflows.export import Export

export = typer.Typer(help="Write the files of a stack for a cluster.", no_args_is_help=True)
app.add_typer(export, name="export")


@export.command("kubernetes")
@takes_stack_options
def kubernetes(  # noqa: PLR0913 - one parameter an option
    *,
    file: File,
    flags: dict[str, Any],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    namespace: Annotated[
        str | None, typer.Option(help="Namespace (default: pdkit, or pdkit-NAME with --name).")
    ] = None,
    flavour: Annotated[
        str,
        typer.Option(
            help="plain (StatefulSets) or disaggregatedset (of LeaderWorkerSet, from version 0.9)."
        ),
    ] = "plain",
    machines: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Number of machines, each with all of these engines."),
    ] = 1,
    link_gbit: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="With --machines: bandwidth of each machine's link, to compare with KV traffic.",
        ),
    ] = None,
    inventory: Inventory = None,
    json: Json = False,
) -> CommandResult:
    """Write a kustomize base, and an overlay for each vendor. Needs no cluster; holds no secret."""
    from deploy.document import as_document
    from deploy.runtime.detect.inventory_file import read_inventory
    from deploy.runtime.home import Home
    from deploy.workflows.export import ExportRequest
    from deploy.workflows.export import export as exported
    from deploy.workflows.export_folder import Exported, next_commands, write_export

    source = load_source(flags, file, ask=not json)
    wanted = ExportRequest(namespace, flavour, machines, link_gbit)
    with naming_origins(source.origins):
        machine = read_inventory(inventory) if inventory else None
        made = exported(source.spec, Home.from_environ(), machine, wanted)
        files = write_export(made, output)
    then = next_commands(made, source.spec, output)
    done = Exported(
        namespace=made.namespace,
        files=[str(path) for path in files],
        pods=made.pods,
        images=made.images,
        notes=made.notes,
        then=then,
    )
    wrote = f"wrote {len(files)} files to {output}"
    return CommandResult(
        "export kubernetes", as_document(done), "\n".join((wrote, *_lines(made, then)))
    )


def _lines(made: Export, then: list[str]) -> Iterator[str]:
    yield from made.notes
    for vendor, pods in made.pods.items():
        counted = ", ".join(f"{count} {name}" for name, count in pods.items())
        yield f"pods of overlays/{vendor}: {counted}"
    yield f"nodes pull {', '.join(made.images)}"
    yield from ("", "next:")
    yield from (f"  {line}" for line in then)
