"""The commands that look at a running stack."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import Annotated

import typer

from deploy.cli.app import app
from deploy.cli.options import Context, InCluster, Json, Name, Namespace, require_fitting
from deploy.cli.result import CommandResult
from deploy.cli.shared import stack_name, unhealthy
from deploy.errors import UsageError

_WATCH_S, _WATCH_CLUSTER_S = 2.0, 5.0


@app.command()
def status(  # noqa: PLR0913 - one parameter an option
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(help="With --watch: seconds between refreshes (default: 2; 5 in a cluster)."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="With --watch: stop after this many refreshes (default: never)."),
    ] = None,
    kubernetes: InCluster = False,
    context: Context = None,
    namespace: Namespace = None,
    name: Name = None,
    json: Json = False,
) -> CommandResult:
    """Show what runs, how full it is, and the cache hit rate."""
    remote = {"--context": context, "--namespace": namespace}
    require_fitting(kubernetes=kubernetes, needs=remote, refuses={"--name": name})
    if not watch and (interval is not None or count is not None):
        raise UsageError(
            "--interval and --count need --watch", hint="deploy status --watch --count 10"
        )
    if kubernetes and watch:
        return _watch_cluster(context, namespace, interval, count, json=json)
    if kubernetes:
        return _status_in_cluster(context, namespace)
    chosen = stack_name(name)  # before the imports: it imports the settings the quick way
    from deploy.document import as_document
    from deploy.output.views import status_view
    from deploy.runtime.home import Home
    from deploy.workflows.status import stack_status

    if watch:
        from deploy.cli.watching import watch_stack
        from deploy.workflows.watch import StackWatch

        every_s = _WATCH_S if interval is None else interval
        seen = StackWatch(Home.from_environ(), chosen)
        return watch_stack(seen, interval_s=every_s, frames=count, json=json)
    found = stack_status(Home.from_environ(), chosen)
    errors = unhealthy(found.sick, chosen) if found.up else []
    return CommandResult("status", as_document(found), status_view(found), errors)


@app.command()
def logs(
    service: Annotated[str | None, typer.Argument(help="Service to show (default: all).")] = None,
    *,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="Number of lines per service to start with.")
    ] = 50,
    name: Name = None,
    json: Json = False,
) -> CommandResult:
    """Print the last lines of each service's log."""
    from deploy.document import as_document
    from deploy.runtime.home import Home
    from deploy.runtime.logs import follow as following
    from deploy.workflows.logs import LogLine, Logs, chosen_services, log_source

    chosen = stack_name(name)
    source = log_source(Home.from_environ(), chosen)
    services = chosen_services(source, chosen, service)
    found = [(who, line) for who in services for line in source.log_lines(who, lines)]

    def shown(who: str, line: str) -> str:
        return line if len(services) == 1 else f"{who} | {line}"

    if follow and json:
        raise UsageError("-f and --json cannot be used together", hint="leave one of them out")
    if follow:
        with suppress(KeyboardInterrupt):
            for who, line in chain(found, following(source.log_reader(services))):
                print(shown(who, line), flush=True)
        return CommandResult("logs", None, "")
    text = "\n".join(shown(who, line) for who, line in found)
    read = Logs(
        files={who: source.where_log(who) for who in services},
        lines=[LogLine(who, line) for who, line in found],
    )
    return CommandResult("logs", as_document(read), text)


def _watch_cluster(
    context: str | None, namespace: str | None, interval: float | None, count: int | None,
    *, json: bool,
) -> CommandResult:  # fmt: skip
    from deploy.cli.watching import watch_stack
    from deploy.runtime.kubectl import Kubectl
    from deploy.workflows.cluster_status import ClusterWatch

    every_s = _WATCH_CLUSTER_S if interval is None else interval
    watch = ClusterWatch(Kubectl(context or "", namespace or ""))
    hint = "deploy status --kubernetes"
    return watch_stack(watch, interval_s=every_s, frames=count, json=json, hint=hint)


def _status_in_cluster(context: str | None, namespace: str | None) -> CommandResult:
    from deploy.document import as_document
    from deploy.output.views import status_view
    from deploy.runtime.kubectl import Kubectl
    from deploy.workflows.cluster_status import cluster_status

    found = cluster_status(Kubectl(context or "", namespace or ""))
    logs_of_sick = [one.log for one in found.services if one.name in found.sick]
    errors = unhealthy(found.sick, found.name, hint=next(iter(logs_of_sick), ""))
    return CommandResult("status", as_document(found), status_view(found), errors)
