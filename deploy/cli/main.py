"""The boundary: runs a command, prints its answer or its error, and gives the exit code."""

from __future__ import annotations

import atexit
import gc
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Literal

import typer

from deploy.cli.commands import app_for, without_alias
from deploy.cli.hints import fitted_hint, not_a_number
from deploy.cli.printing import drop, print_error, print_text
from deploy.cli.result import INTERNAL_ERROR, CommandResult
from deploy.errors import Interrupted, MachineError, PdkitError, UsageError
from deploy.runtime.interrupts import interrupt_once

# What stdout gets: text, one JSON envelope, or one envelope a line, printed by the command.
OutputFormat = Literal["text", "json", "lines"]

# `bench` is a command itself, and a group.
_GROUPED = {("bench", "sweep"), ("bench", "compare"), ("bench", "report"), ("export", "kubernetes")}

# Exit frees everything anyway: a last garbage collection took a sixth of the CPU of `plan`.
atexit.register(gc.freeze)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `deploy` command and return its exit code."""
    arguments = without_alias(sys.argv[1:] if argv is None else argv)
    form = _form(arguments)
    words = [word for word in arguments if not word.startswith("-")]
    command = " ".join(words[: 2 if tuple(words[:2]) in _GROUPED or words[:1] == ["images"] else 1])
    interrupt_once()
    try:
        typed = app_for(arguments)
        result = typed(args=arguments or ["--help"], prog_name="deploy", standalone_mode=False)
        return _finish(result, command, form) if arguments else UsageError.exit_code
    except PdkitError as exc:
        exc.hint = fitted_hint(exc, arguments, command)
        return _fail(exc, command, form)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(_interrupted(command), command, form)
    except (BrokenPipeError, SystemExit):  # how typer ends when the reader of a pipe is gone
        drop(sys.stdout)
        return 0
    except OSError as exc:
        return _fail(
            MachineError(f"{exc}", hint="fix this, then run the command again"), command, form
        )
    except Exception as exc:  # noqa: BLE001 - the boundary: every bug must end with a message
        return _fail_unexpectedly(exc, arguments, command, form)


def _form(arguments: Sequence[str]) -> OutputFormat:
    if "--json" not in arguments:
        return "text"
    return "lines" if "--watch" in arguments else "json"


def _finish(result: Any, command: str, form: OutputFormat) -> int:
    if isinstance(result, CommandResult):
        if form == "json":
            _print_envelope(result.command, result.exit_code, result.data, result.errors)
        elif form == "text":
            print_text(result.text, sys.stdout)
            for error in result.errors:
                print_error(error)
        return result.exit_code
    if result == Interrupted.exit_code:  # typer turns Ctrl-C into this exit code
        return _fail(_interrupted(command), command, form)
    return int(result or 0)


def _fail(error: PdkitError, command: str, form: OutputFormat) -> int:
    if form != "text":
        _print_envelope(command, error.exit_code, None, (error,), form)
    else:
        print_error(error)
    return error.exit_code


def _fail_unexpectedly(
    exc: Exception, arguments: Sequence[str], command: str, form: OutputFormat
) -> int:
    """Turn typer's own usage errors into ours, and show a traceback for anything else."""
    format_message = getattr(exc, "format_message", None)
    if format_message is not None:
        line = not_a_number(exc, arguments) or " ".join(str(format_message()).split())
        context = getattr(exc, "ctx", None)  # of the command that did not understand the rest
        known = f"{context.command_path if context else 'deploy'} --help"
        return _fail(UsageError(line[:1].lower() + line[1:], hint=known), command, form)
    traceback.print_exc()
    if form != "text":
        internal = PdkitError(f"{type(exc).__name__}: {exc}", hint="report this as a bug of pdkit")
        _print_envelope(command, INTERNAL_ERROR, None, (internal,), form)
    return INTERNAL_ERROR


def _print_envelope(
    command: str,
    exit_code: int,
    data: Any,
    errors: Sequence[PdkitError],
    form: OutputFormat = "json",
) -> None:
    from deploy.output.envelope import envelope

    indent = None if form == "lines" else 2
    text = envelope(command, exit_code=exit_code, data=data, errors=errors, indent=indent)
    print_text(text, sys.stdout)


def _interrupted(command: str) -> Interrupted:
    undone = "; everything this command started has been stopped" if command == "up" else ""
    return Interrupted(f"interrupted{undone}")


if __name__ == "__main__":
    raise SystemExit(main())
