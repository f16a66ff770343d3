"""The commands, a module per topic; each imports what it needs when it runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module

import typer
from typer.models import CommandInfo

from deploy.cli.app import app

# The module of each command, in the order of the help.
_MODULES = {
    "check": "check",
    "doctor": "doctor",
    "fixes": "fixes",
    "init": "init",
    "restart": "restart", "drain": "restart", "undrain": "restart",
    "up": "stack", "plan": "plan", "render": "plan", "status": "status", "logs": "status",
    "down": "stack",
    "swap": "swap", "rollback": "swap",
}  # fmt: skip
# Other names of commands, as the first word that is typed.
_ALIASES = {"patches": "fixes"}
_GROUPS = ("bench", "bench_compare", "bench_sweep", "export", "images")


def without_alias(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the command's own name where another one was typed."""
    return [_ALIASES.get(word, word) if not at else word for at, word in enumerate(arguments)]


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the application with only the typed command; with all if the table lacks it.

    Importing all commands and letting typer inspect their options takes as long as a plan.
    """
    command = arguments[0] if arguments else ""
    if command not in _MODULES:
        return whole_app()
    import_module(f"{__name__}.{_MODULES[command]}")
    narrowed = copy.copy(app)
    narrowed.registered_commands = [one for one in app.registered_commands if _name(one) == command]
    narrowed.registered_groups = []
    return narrowed


def whole_app() -> typer.Typer:
    """Return the application with all commands."""
    for module in (*_MODULES.values(), *_GROUPS):
        import_module(f"{__name__}.{module}")
    order = list(_MODULES)
    app.registered_commands.sort(key=lambda one: order.index(_name(one)))
    return app


def _name(command: CommandInfo) -> str:
    return command.name or str(getattr(command.callback, "__name__", ""))
