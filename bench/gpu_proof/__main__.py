"""Test the kit on this machine's GPUs: `scripts/gpu-proof`.

Needs no Docker and no network. Installs the engines from a folder of wheels, makes a model with
random weights, and uses the kit's own commands. Each step takes less than 8 minutes; a run that
was cut off goes on where it ended. Writes docs/results/gpu-NAME.md, and what the vendor's tools
printed as fixtures for the tests.

Exits with 0 if no step failed, 1 if one did, 3 where something is missing, and 4 where
the time was up before all were done: run it again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from bench.gpu_proof.install import InstallFailed, engines_python
from bench.gpu_proof.model import SHAPES
from bench.gpu_proof.results import ROOT

_MARK = "PDKIT_GPU_PROOF_BEGAN"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install engines from")
    parser.add_argument("--python", type=Path, help="a Python that has engines and kit already")
    parser.add_argument(
        "--state", type=Path, default=ROOT / ".gpu-proof", help="folder to go on in"
    )
    parser.add_argument("--only", metavar="STEP", help="run this step alone, done or not")
    parser.add_argument(
        "--shape", choices=SHAPES, default="qwen3-0.6b", help="of the model (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=30, help="start no step after that")
    parser.add_argument("--port", type=int, help="where the stack listens; 20 ports from here on")
    parser.add_argument("--keep", action="store_true", help="leave the stack up at the end")
    parser.add_argument("--cpu", action="store_true", help="on processors, with .venv's engines")
    parser.add_argument("--short", action="store_true", help="one stack, a small model")
    parser.add_argument("--results", type=Path, help="the page, in place of docs/results")
    return parser.parse_args()


def main() -> int:
    asked = options()
    os.environ.setdefault(_MARK, str(time.time()))
    try:
        python = engines_python(asked.state.absolute(), asked.wheels, asked.python, cpu=asked.cpu)
    except InstallFailed as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 3
    # Not resolved: an environment's Python is a link to the system's.
    if os.path.abspath(sys.executable) != str(python.absolute()):  # noqa: PTH100
        os.execv(python, (str(python), "-m", "bench.gpu_proof", *sys.argv[1:]))  # noqa: S606 - our own
    from bench.gpu_proof.run import run

    return run(asked, began=float(os.environ[_MARK]))


if __name__ == "__main__":
    sys.exit(main())
