"""The options of commands that look at a stack in a cluster, through kubectl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import HELP, UsageError

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


def require_fitting(
    *, kubernetes: bool, needs: Mapping[str, object], refuses: Mapping[str, object]
) -> None:
    """Refuse options that are only for a cluster, or only for this machine.

    Args:
        needs: option → what was given for it, of those that need --kubernetes.
        refuses: those that do not go with it.
    """
    given = [option for option, value in (refuses if kubernetes else needs).items() if value]
    if given:
        how = "cannot be used with" if kubernetes else "needs"
        raise UsageError(f"{given[0]} {how} --kubernetes", hint=HELP)
