"""Do faults to a real stack under load: `python -m bench.faults --port PORT`.

Starts a CPU stack for each round, or for several, has clients ask prompts with known answers, does
one fault after the other at random moments, judges every request afterwards, and takes it down.
With --history a run that was broken off goes on: the same command leaves out what has a result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.faults.clients import Clients
from bench.faults.faults import KINDS, faults_of
from bench.faults.history import History, Results
from bench.faults.trial import Load, trial
from deploy.runtime.home import Home
from deploy.workflows.running import RunningStack, require_stack

NAME = "faults"
_PROMPTS, _CHARACTERS, _TOKENS = 8, 700, 24
# A service that takes this many times its own first start has not come back.
_BACK = 20


def deploy(home: Path, *arguments: str) -> Any:
    """Run a command of the kit, and return its data."""
    done = subprocess.run(
        (sys.executable, "-m", "deploy", *arguments, "--json"),
        env={**os.environ, "PDKIT_HOME": str(home), "PDKIT_RUNTIME": "process",
             "PDKIT_VENDOR": "cpu"},
        stdout=subprocess.PIPE, text=True, check=False, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"deploy {' '.join(arguments)} failed: {done.stdout}")
    return json.loads(done.stdout)["data"]


@contextmanager
def stack(home: Path, given: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Run a stack; yields how long each service took to start."""
    names = ("--name", NAME)
    options = ("--port", str(given.port), "--topology", given.topology)
    if given.connector:
        options += ("--connector", given.connector)
    try:
        up = deploy(home, "up", *names, *options)
        yield up["started"]
    finally:
        deploy(home, "down", *names)


def known_answers(url: str, model: str, prompts: list[str]) -> dict[int, str]:
    """Ask each prompt alone, twice, and return the answers."""
    history = History()
    asking = Clients(url, model, prompts, history, count=0, tokens=_TOKENS, seed=0)
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
        for number in range(len(prompts)):
            first, second = asking.ask(http, number, 0), asking.ask(http, number, 1)
            if first.trouble or second.trouble or first.text != second.text:
                raise SystemExit(f"prompt {number} has no certain answer: {first}, {second}")
            history.add(first)
    return {one.prompt: one.text for one in history.requests}


def options() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--topology", default="2p2d")
    made.add_argument("--connector", help="by default the one of the version pair")
    made.add_argument("--port", type=int, default=18000)
    made.add_argument("--clients", type=int, default=8)
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument(
        "--rounds-per-stack",
        type=int,
        default=1,
        help="at most 5: the supervisor gives up what dies six times without ten calm minutes",
    )
    made.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    made.add_argument("--fault", nargs="+", help="by their names, as the results have them")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--history", type=Path, help="folder for results and one line a request")
    made.add_argument(
        "--home", type=Path, help="mount point of a small file system, which adds 'disk full'"
    )
    return made


def main() -> None:
    """Measure, print a row a trial, and fail where a request was wrong, lost or late."""
    given = options().parse_args()
    choice = random.Random(given.seed)  # noqa: S311 - the same ones each time
    prompts = [
        f"{number:02d} " + "".join(choice.choice("abcdefgh ") for _ in range(_CHARACTERS))
        for number in range(_PROMPTS)
    ]
    results = Results(given.history)
    place = nullcontext(str(given.home)) if given.home else tempfile.TemporaryDirectory()
    with place as folder:
        seeds = [given.seed + 100 * number for number in range(given.rounds)]
        for first in range(0, given.rounds, given.rounds_per_stack):
            together = seeds[first : first + given.rounds_per_stack]
            on_one_stack(Path(folder), given, prompts, results, together)
    if results.bad:
        raise SystemExit(f"{results.bad} requests were wrong, lost or late")


def on_one_stack(
    folder: Path,
    given: argparse.Namespace,
    prompts: list[str],
    results: Results,
    seeds: Sequence[int],
) -> None:
    """Try each fault once in each round, on a stack of their own."""
    if given.fault and all(results.has(name, seed) for name in given.fault for seed in seeds):
        return
    with stack(folder, given) as started:
        find = partial(require_stack, Home.from_environ({"PDKIT_HOME": str(folder)}), NAME)
        print(f"starts: {json.dumps(started)}", flush=True)
        running = find()
        url, model = running.stack.front.url, running.prepared.plan.model.served_name
        load = Load(
            prompts, known_answers(url, model, prompts), given.clients, _TOKENS,
            back_s=max(Load.back_s, _BACK * max(started.values())),
        )  # fmt: skip
        for seed, name in itertools.product(seeds, chosen(running, given)):
            if results.has(name, seed):
                continue
            fault = faults_of(find(), partial(deploy, folder), given.home)[name]
            row = trial(find, fault, load, seed, results.requests_of(name, seed))
            results.add(row)
            print(json.dumps(row), flush=True)


def chosen(running: RunningStack, given: argparse.Namespace) -> list[str]:
    """Return the names of the faults that are asked for."""
    known = faults_of(running, deploy, given.home)
    unknown = set(given.fault or ()) - known.keys()
    if unknown:
        raise SystemExit(f"no fault {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return given.fault or [name for name, one in known.items() if one.kind in given.only]


if __name__ == "__main__":
    main()
