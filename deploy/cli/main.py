"""The boundary: runs a command, prints its answer or its error, and gives the exit code."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import typer

from deploy.cli.answer import Answer
from deploy.cli.commands import app
from deploy.errors import Interrupted, MachineError, PdkitError, UsageError

_INTERNAL_ERROR = 70  # sysexits' EX_SOFTWARE: a fault of the kit, not one of the contract's codes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `deploy` command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    command = next((word for word in arguments if not word.startswith("-")), "")
    _interrupt_once()
    try:
        asked = arguments or ["--help"]
        code = _finish(app(args=asked, prog_name="deploy", standalone_mode=False), as_json)
        return code if arguments else UsageError.exit_code
    except PdkitError as exc:
        return _fail(exc, command, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(_interrupted(), command, as_json)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; nothing is left to say
        return 0
    except OSError as exc:
        return _fail(MachineError(f"{exc}", hint="free or allow it, then repeat"), command, as_json)
    except Exception as exc:  # noqa: BLE001 - the boundary: no fault may end without a message
        return _fail_unexpectedly(exc, command, as_json)


def _finish(result: Any, as_json: bool) -> int:
    if isinstance(result, Answer):
        if as_json:
            _print_envelope(result.command, result.exit_code, result.data, result.errors)
        elif result.text:
            print(result.text)
        if not as_json:
            for error in result.errors:
                _print_error(error)
        return result.exit_code
    if result == Interrupted.exit_code:  # typer turns Ctrl-C into this exit code
        return _fail(_interrupted(), "", as_json)
    return int(result or 0)


def _fail(error: PdkitError, command: str, as_json: bool) -> int:
    if as_json:
        _print_envelope(command, error.exit_code, None, (error,))
    else:
        _print_error(error)
    return error.exit_code


def _fail_unexpectedly(exc: Exception, command: str, as_json: bool) -> int:
    """Turn typer's own usage errors into ours, and show a traceback for anything else."""
    format_message = getattr(exc, "format_message", None)
    if format_message is not None:
        line = " ".join(str(format_message()).split())
        unknown = "no such command" in line.lower()
        known = f"deploy {command} --help" if command and not unknown else "deploy --help"
        return _fail(UsageError(line[:1].lower() + line[1:], hint=known), command, as_json)
    traceback.print_exc()
    if as_json:
        internal = PdkitError(f"{type(exc).__name__}: {exc}", hint="report this as a bug of pdkit")
        _print_envelope(command, _INTERNAL_ERROR, None, (internal,))
    return _INTERNAL_ERROR


def _print_envelope(command: str, exit_code: int, data: Any, errors: Sequence[PdkitError]) -> None:
    from deploy.output.envelope import envelope

    print(envelope(command, exit_code=exit_code, data=data, errors=errors))


def _print_error(error: PdkitError) -> None:
    print(f"error: {error.message}", file=sys.stderr)
    for line in error.details:
        print(f"  | {line}", file=sys.stderr)
    if error.hint:
        print(f"try: {error.hint}", file=sys.stderr)


def _interrupted() -> Interrupted:
    return Interrupted("interrupted; what this command had started is stopped")


def _interrupt_once() -> None:
    """Make TERM and HUP act as Ctrl-C, and let only the first count: the rest is clean-up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for later in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(later, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


if __name__ == "__main__":
    raise SystemExit(main())
