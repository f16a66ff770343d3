"""What the Job of an exported stack runs: `python -m deploy.cli.cluster_check DOCUMENT SECRETS`.

With `--json` after these, stdout gets one line of JSON, for `deploy check --kubernetes`: the data
and the text of `deploy check`, or the error with which it ends.

It needs no typer: an engine's image has what else it imports.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from deploy.cli.printing import print_error, print_text, progress
from deploy.cli.result import INTERNAL_ERROR
from deploy.errors import CheckFailed, Interrupted, PdkitError
from deploy.output.check_view import check_view
from deploy.runtime.interrupts import interrupt_once
from deploy.workflows.cluster_check import check_cluster


def main(document: Path, secrets: Path, *, as_json: bool = False) -> int:
    """Check the stack of a document; return the exit code that `deploy check` would give.

    Args:
        secrets: the folder with the secrets by which the stack is reached.
        as_json: print a line that a program reads.
    """
    interrupt_once()
    try:
        report = check_cluster(document, secrets, progress())
    except PdkitError as exc:
        if as_json:
            _print_line({"error": {**exc.as_dict(), "exit_code": exc.exit_code}})
        else:
            print_error(exc)
        return exc.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code
    except Exception:  # noqa: BLE001 - else a bug would look like a failed check
        traceback.print_exc()
        return INTERNAL_ERROR
    if as_json:
        _print_line({"data": report.as_dict(), "text": check_view(report)})
    else:
        print_text(check_view(report), sys.stdout)
    return 0 if report.passed else CheckFailed.exit_code


def _print_line(said: dict[str, Any]) -> None:
    print_text(json.dumps(said), sys.stdout)


if __name__ == "__main__":
    _, first, second, *options = sys.argv
    raise SystemExit(main(Path(first), Path(second), as_json="--json" in options))
