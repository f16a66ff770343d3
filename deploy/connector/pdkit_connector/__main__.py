"""Print the fixes and their state for the LMCache installed here.

Exit code 0: no fix failed; 1: one did, or LMCache or vLLM is broken, and then stdout is empty; 3:
LMCache or something it needs is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import sys
from typing import Any

from pdkit_connector.registry import (
    Fix,
    FixOutcome,
    FixState,
    Registry,
    Setting,
    disabled_ids,
    discover,
)
from pdkit_connector.releases import TESTED, installed_lmcache


def main(argv: list[str] | None = None) -> int:
    """Apply the fixes in this process and print the outcome of each; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pdkit_connector", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON object on stdout")
    parser.add_argument(
        "--list", action="store_true", help="only list the fixes; needs no LMCache and prints JSON"
    )
    options = parser.parse_args(argv)
    if options.list:
        print(json.dumps([described(fix) for fix in discover()], indent=2))
        return 0
    missing = [name for name in ("lmcache", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{' and '.join(missing)} not installed for {sys.executable}: run this with the "
            "engine's Python, or in its image",
            file=sys.stderr,
        )
        return 3
    gc.disable()  # imports make no garbage, and collecting it takes a fifth of their time
    # vLLM logs to stdout, which here is for the answer alone.
    with contextlib.redirect_stdout(sys.stderr):
        _require_engine()
        fixes = discover()
        outcomes = Registry(fixes).apply(Setting(), disabled_ids(fixes))
    print(json.dumps(report(outcomes), indent=2) if options.json else table(outcomes))
    return int(any(outcome.state is FixState.FAILED for outcome in outcomes))


def _require_engine() -> None:
    """Raise what importing LMCache and vLLM raises: the fixes cannot help if they are broken."""
    import lmcache  # noqa: F401

    if importlib.util.find_spec("vllm") is not None:
        from vllm.config import VllmConfig  # noqa: F401


def described(fix: Fix) -> dict[str, str]:
    """Describe a fix where LMCache is not installed."""
    return {"id": fix.id, "title": fix.title, "link": fix.link, "reason": fix.reason}


def report(outcomes: tuple[FixOutcome, ...]) -> dict[str, Any]:
    """Return the JSON object: the release, whether the fixes are tested with it, the fixes."""
    release = installed_lmcache()
    fixes = [o.as_dict() for o in outcomes]
    return {"lmcache": release, "tested": release in TESTED, "fixes": fixes}


def table(outcomes: tuple[FixOutcome, ...]) -> str:
    """Return one line a fix: id, state, title, link, evidence."""
    return "\n".join(
        f"{o.fix.id:<5} {o.state.value:<15} {o.fix.title} [{o.fix.link}]\n{'':<22}{o.evidence}"
        for o in outcomes
    )


if __name__ == "__main__":
    sys.exit(main())
