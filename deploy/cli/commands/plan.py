"""The commands that show a stack before it is started: plan and render."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.app import app
from deploy.cli.hints import naming_origins
from deploy.cli.options import File, Inventory, Json, takes_stack_options
from deploy.cli.result import CommandResult
from deploy.cli.shared import load_source, plan_answer

if TYPE_CHECKING:
    from deploy.config.spec import StackSpec
    from deploy.runtime.home import Home
    from deploy.workflows.prepare import Prepared


@app.command()
@takes_stack_options
def plan(
    *, file: File, flags: dict[str, Any], inventory: Inventory = None, json: Json = False
) -> CommandResult:
    """Show engines, devices, ports and memory. Needs no GPU and starts nothing."""
    from deploy.runtime.home import Home
    from deploy.workflows.facts import runtime_here
    from deploy.workflows.user_files import api_key

    source = load_source(flags, file, ask=not json)
    with naming_origins(source.origins):
        home = Home.from_environ()
        prepared = _prepare(source.spec, inventory, home, runtime_here(source.spec, home))
        if inventory is None:  # the paths of another machine are not looked for here
            api_key(source.spec)
            if prepared.plan.user_redis:
                from deploy.workflows.user_redis import redis_url

                redis_url(prepared)
        return plan_answer("plan", prepared)


@app.command()
@takes_stack_options
def render(
    *,
    file: File,
    flags: dict[str, Any],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Write the files to this folder instead of printing them."
        ),
    ] = None,
    inventory: Inventory = None,
    json: Json = False,
) -> CommandResult:
    """Print the Compose document of a stack, or its processes. Secrets are shown by name only."""
    from deploy.runtime.home import Home
    from deploy.stack.document import document_yaml
    from deploy.workflows.render import rendered

    home = Home.from_environ()
    # Printed output may be for any machine; written files are for this one.
    source = load_source(flags, file, ask=not json)
    with naming_origins(source.origins):
        probe = output is not None
        prepared = _prepare(source.spec, inventory, home, "compose", probe=probe)
        if output is None:
            document = rendered(prepared, home)
            return CommandResult("render", document, document_yaml(document).rstrip("\n"))
        from deploy.workflows.render import write_rendered

        files, then = write_rendered(prepared, home, output)
    text = "\n".join((*(f"wrote {path}" for path in files), f"start it with: {then}"))
    return CommandResult("render", {"files": [str(path) for path in files], "start": then}, text)


def _prepare(
    spec: StackSpec,
    inventory: Path | None,
    home: Home,
    auto_runtime: str,
    *,
    probe: bool = True,
) -> Prepared:
    """Return a plan to show; `auto_runtime` is what the runtime 'auto' selects.

    The hub is asked for a model that is not here. Without an answer, the notes say what is unknown.
    """
    from deploy.workflows.facts import stated_facts
    from deploy.workflows.hub import described_model
    from deploy.workflows.model_reading import planned_by_kept_answer
    from deploy.workflows.prepare import prepare

    machine = None
    if inventory:
        from deploy.runtime.detect.inventory_file import read_inventory

        machine = read_inventory(inventory)
    facts = stated_facts(spec, machine, runtime=auto_runtime, probe=probe)
    model = described_model(spec, home, facts.vendor, lambda _: None, runtime=facts.runtime)
    return planned_by_kept_answer(prepare(spec, home, facts, model=model), home)
