"""What the Job of an exported stack runs: `python -m deploy.cli.cluster_check DOCUMENT SECRETS`.

With `--json` after these, stdout gets one line of JSON, for `deploy check --kubernetes`: the data
and the text of `deploy check`, or the error with which it ends. `--junit NAME` adds the findings as
JUnit XML, by that name of the stack. `--prompt` is the text of the `--prompt-file` of `deploy
check`, whose other options are the same here.

It needs no typer: an engine's image has what else it imports.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deploy.cli.check_runs import repeated, summary
from deploy.cli.printing import print_error, print_text, progress
from deploy.cli.result import INTERNAL_ERROR
from deploy.errors import CheckFailed, Interrupted, PdkitError
from deploy.output.junit import junit_xml
from deploy.runtime.interrupts import interrupt_once
from deploy.workflows.check import CheckOptions
from deploy.workflows.cluster_check import check_cluster


def main(arguments: Sequence[str]) -> int:
    """Check the stack of a document; return the exit code that `deploy check` would give."""
    interrupt_once()
    told = _told(arguments)
    options = CheckOptions(
        told.pairs or ("*:*",), quick=told.quick, least=told.min_hit_rate, prompt=told.prompt
    )
    report = progress()
    check = partial(check_cluster, told.document, told.secrets, report)
    try:
        reports = list(repeated(check, options, told.repeat, report))
    except PdkitError as exc:
        if told.json:
            _print_line({"error": {**exc.as_dict(), "exit_code": exc.exit_code}})
        else:
            print_error(exc)
        return exc.exit_code
    except KeyboardInterrupt:
        return Interrupted.exit_code
    except Exception:  # noqa: BLE001 - else a bug would look like a failed check
        traceback.print_exc()
        return INTERNAL_ERROR
    data, text = summary(reports)
    if told.json:
        xml = {"junit": junit_xml(reports, told.junit)} if told.junit else {}
        _print_line({"data": data, "text": text, **xml})
    else:
        print_text(text, sys.stdout)
    return 0 if data["passed"] else CheckFailed.exit_code


def _print_line(said: dict[str, Any]) -> None:
    print_text(json.dumps(said), sys.stdout)


def _told(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("document", type=Path)
    parser.add_argument("secrets", type=Path, help="folder with the secrets needed to reach it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--junit", default="", metavar="NAME")
    parser.add_argument("--pairs", action="append")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--min-hit-rate", type=float, default=1.0)
    parser.add_argument("--prompt")
    parser.add_argument("--repeat", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
