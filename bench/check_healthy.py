"""Measure that the check raises no false alarm: `python -m bench.check_healthy`.

Brings up a stack as users do, and lets `deploy check --repeat` ask it: first alone, then while
somebody else holds short conversations with it. Every run must pass and name no cause.

Exits with 1 if one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.kit import deploy_command, deploy_json, free_ports, started
from bench.redis_path.page import machine

NAME = "healthy"
_RUN_S = 120  # seconds that a run may take on a slow machine
_PAUSE_S = 1.0  # between one's requests
_ANSWER_TOKENS = 24

_PAGE = """# No false alarms

`python -m bench.check_healthy --runs {runs} --results FILE` wrote this page on {date}.

{machine}

The stack is what `deploy up` makes of `vendor: cpu` and `topology: {topology}`: the tiny model, as
processes. `deploy check --repeat {runs}` ran all of its tests, first alone, then while one client
sent a request a second: growing conversations, from a few tokens to several chunks.

{table}
"""


@dataclass(frozen=True)
class CheckRuns:
    """The results of the runs of one command.

    Attributes:
        others: requests that the client's conversations made meanwhile.
        causes: what the first run that failed named.
    """

    how: str
    runs: int
    passed: int
    slowest_s: float
    others: int
    causes: Sequence[str]

    @property
    def holds(self) -> bool:
        return self.passed == self.runs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50, help="alone, and again beside traffic")
    parser.add_argument("--topology", default="1p1d")
    parser.add_argument("--results", type=Path, help="write the page of results there")
    options = parser.parse_args()
    with _stack(options.topology) as (folder, url):
        checked = [_checked(folder, "alone", options.runs)]
        with _traffic(url) as sent:
            checked.append(_checked(folder, "beside traffic", options.runs, sent))
    print(_table(checked))
    if options.results:
        options.results.write_text(_page(checked, options.topology), encoding="utf-8")
    return 0 if all(one.holds for one in checked) else 1


@contextlib.contextmanager
def _stack(topology: str) -> Iterator[tuple[Path, str]]:
    """Start a stack, and end it with the context; yields its home and where it serves."""
    with tempfile.TemporaryDirectory(prefix="pdkit-healthy-") as name:
        folder, port = Path(name), free_ports()
        how = {"vendor": "cpu", "runtime": "process", "topology": topology}
        with started(folder, {"name": NAME, "port": port, **how}):
            deploy_command(folder, "check", "--name", NAME)
            yield folder, f"http://127.0.0.1:{port}"


def _checked(folder: Path, how: str, runs: int, sent: Sequence[int] = ()) -> CheckRuns:
    before = len(sent)
    arguments = ("check", "--name", NAME, "--repeat", str(runs))
    data = deploy_json(folder, *arguments, timeout_s=_RUN_S * runs)["data"]
    return CheckRuns(
        how,
        data["runs"],
        data["runs_passed"],
        data["slowest_s"],
        len(sent) - before,
        [cause["code"] for cause in data["diagnosis"]] + data["failures"],
    )


@contextlib.contextmanager
def _traffic(url: str) -> Iterator[list[int]]:
    """Hold conversations until the context ends; yields the statuses of the answers so far."""
    stop, statuses = threading.Event(), list[int]()

    def talk() -> None:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            for number in itertools.count():
                for body in _conversation(number):
                    if stop.wait(_PAUSE_S):
                        return
                    statuses.append(client.post("/v1/completions", json=body).status_code)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        thread.join()
    if bad := [status for status in statuses if status != httpx.codes.OK]:
        raise RuntimeError(f"{len(bad)} of {len(statuses)} of the others' requests: HTTP {bad[0]}")


def _conversation(number: int) -> Iterator[dict[str, Any]]:
    """Yield requests of which each begins with the one before."""
    words = random.Random(number)  # noqa: S311 - a fixed seed is the point
    said = ""
    for _ in range(5):
        said += "".join(words.choices("abcdefghijklmnopqrstuvwxyz ", k=words.randint(10, 400)))
        yield {"model": "pdkit-tiny", "prompt": said, "max_tokens": _ANSWER_TOKENS}


def _table(checked: Sequence[CheckRuns]) -> str:
    lines = ["| | runs | passed | slowest, s | others' requests | what failed |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for one in checked:
        causes = "; ".join(one.causes) or "-"
        lines.append(
            f"| {one.how} | {one.runs} | {one.passed} | {one.slowest_s:.1f} | {one.others} | "
            f"{causes} |"
        )
    return "\n".join(lines)


def _page(checked: Sequence[CheckRuns], topology: str) -> str:
    return _PAGE.format(
        runs=checked[0].runs,
        date=datetime.datetime.now(tz=datetime.timezone.utc).date(),
        machine=machine("as installed"),
        topology=topology,
        table=_table(checked),
    )


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    sys.exit(code)
