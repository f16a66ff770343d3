"""What the Job of an exported stack runs: `python -m deploy.cli.cluster_check DOCUMENT SECRETS`.

It needs no typer: an engine's image has what else it imports.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from deploy.cli.printing import print_error, print_text, progress
from deploy.cli.result import INTERNAL_ERROR
from deploy.errors import CheckFailed, Interrupted, PdkitError
from deploy.output.check_view import check_view
from deploy.runtime.interrupts import interrupt_once
from deploy.workflows.cluster_check import check_cluster


def main(document: Path, secrets: Path) -> int:
    """Check the stack of a document; return the exit code that `deploy check` would give.

    Args:
        secrets: the folder with the secrets by which the stack is reached.
    """
    interrupt_once()
    try:
        report = check_cluster(document, secrets, progress())
    except PdkitError as exc:
        print_error(exc)
        return exc.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code
    except Exception:  # noqa: BLE001 - else a bug would look like a failed check
        traceback.print_exc()
        return INTERNAL_ERROR
    print_text(check_view(report), sys.stdout)
    return 0 if report.passed else CheckFailed.exit_code


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
