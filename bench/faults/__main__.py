"""Kill and restart each process of a real stack under load: `python -m bench.faults --port PORT`.

Starts a CPU stack of its own, has clients ask prompts with known answers, kills one process after
the other at a random moment, has faults come that pass, restarts engines, router and Redis by
command, and takes the stack down.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.faults.clients import Clients
from bench.faults.history import History
from bench.faults.passing import faults_of
from deploy.runtime.events import read_events
from deploy.runtime.home import Home
from deploy.workflows.running import RunningStack, require_stack

NAME = "faults"
_PROMPTS, _CHARACTERS, _TOKENS = 8, 700, 24
_BEFORE_S, _AFTER_S = (2.0, 6.0), 4.0
_BACK_S = 300.0
_LATE_S = 60.0
_REFUSED = 503


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
def stack(home: Path, topology: str, port: int) -> Iterator[dict[str, float]]:
    """Run a stack; yields how long each service took to start."""
    names = ("--name", NAME)
    try:
        up = deploy(home, "up", *names, "--port", str(port), "--topology", topology)
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


def is_whole(running: RunningStack) -> bool:
    """Tell whether every service serves, and the router sees every engine."""
    return all(running.is_ready(service) for service in running.stack.services) and (
        _serving(running) == len(running.prepared.plan.engines)
    )


def _serving(running: RunningStack) -> int:
    try:
        said = httpx.get(f"{running.stack.front.url}/readiness", trust_env=False, timeout=5).json()
    except httpx.HTTPError:
        return 0
    return int(said["prefill"]["healthy"] + said["decode"]["healthy"])


def kill_under_load(
    home: Home, service: str, answers: dict[int, str], prompts: list[str], given: Any, seed: int
) -> dict[str, Any]:
    """Kill one process under load, and return what became of requests and stack."""
    running = require_stack(home, NAME)
    model, url = running.prepared.plan.model.served_name, running.stack.front.url
    file = given.history / f"{service}-{seed}.jsonl" if given.history else None
    history = History(file)
    choice = random.Random(seed)  # noqa: S311 - as above
    with Clients(url, model, prompts, history, count=given.clients, tokens=_TOKENS, seed=seed):
        time.sleep(choice.uniform(*_BEFORE_S))
        pid, killed = running.state.services[service].pid, time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while (again := require_stack(home, NAME)).state.services[service].pid == pid or (
            not is_whole(again)
        ):
            if time.monotonic() - killed > _BACK_S:
                raise SystemExit(f"{service} did not come back")
            time.sleep(0.1)
        whole_s = time.monotonic() - killed
        time.sleep(_AFTER_S)
    found = history.verdicts(answers, _LATE_S)
    for one in history.named(("wrong", "lost", "late"), answers, _LATE_S):
        print(f"  {service}: {one}", file=sys.stderr)
    flying = sum(one.sent_s <= killed <= one.ended_s for one in history.requests)
    lost = history.named(("lost",), answers, _LATE_S)
    (back,) = [event.text for event in read_events(home.stack(NAME).events_file)
               if (event.service, event.kind) == (service, "back")][-1:]  # fmt: skip
    longest = max((one.ended_s - one.sent_s for one in history.requests), default=0.0)
    return {
        "killed": service, "requests": len(history.requests), "in flight": flying,
        "lost": found["lost"],
        "of them not in flight": sum(not one.sent_s <= killed <= one.ended_s for one in lost),
        "wrong": found["wrong"], "ended by an event": found["ended"], "late": found["late"],
        "longest s": round(longest, 1), "back": back, "whole after s": round(whole_s, 1),
    }  # fmt: skip


def pass_under_load(
    home: Home, fault: str, answers: dict[int, str], prompts: list[str], given: Any, seed: int
) -> dict[str, Any]:
    """Have a fault come and pass under load, and return what became of requests and stack."""
    running = require_stack(home, NAME)
    model, url = running.prepared.plan.model.served_name, running.stack.front.url
    file = given.history / f"{fault}-{seed}.jsonl".replace(" ", "-") if given.history else None
    history = History(file)
    choice = random.Random(seed)  # noqa: S311 - as above
    happen, service = faults_of(running)[fault]
    restarts = {name: record.starts for name, record in running.state.services.items()}
    with Clients(url, model, prompts, history, count=given.clients, tokens=_TOKENS, seed=seed):
        time.sleep(choice.uniform(*_BEFORE_S))
        began = time.monotonic()
        happen(running, service)
        passed = time.monotonic()
        while not is_whole(running):
            if time.monotonic() - passed > _BACK_S:
                raise SystemExit(f"{fault}: the stack is not whole any more")
            time.sleep(0.1)
        whole_s = time.monotonic() - passed
        time.sleep(_AFTER_S)
    found = history.verdicts(answers, _LATE_S)
    lost = history.named(("lost",), answers, _LATE_S)
    refused = [one for one in lost if one.status == _REFUSED]
    for one in history.named(("wrong", "lost", "late", "ended"), answers, _LATE_S):
        if one not in refused:
            print(f"  {fault}: {one}", file=sys.stderr)
    meanwhile = [one for one in history.requests if one.ended_s >= began and one.sent_s <= passed]
    after = require_stack(home, NAME).state.services
    return {
        "fault": fault, "requests": len(history.requests), "meanwhile": len(meanwhile),
        "refused": len(refused), "lost": len(lost) - len(refused),
        "wrong": found["wrong"], "ended by an event": found["ended"], "late": found["late"],
        "longest s": round(max(one.ended_s - one.sent_s for one in history.requests), 1),
        "whole after s": round(whole_s, 1),
        "started again": [name for name in after if after[name].starts != restarts[name]],
    }  # fmt: skip


def restart_under_load(
    home: Home, folder: Path, what: tuple[str, ...], answers: dict[int, str], prompts: list[str],
    given: Any,
) -> dict[str, Any]:  # fmt: skip
    """Restart engines or the router by command, and return what became of requests."""
    running = require_stack(home, NAME)
    model, url = running.prepared.plan.model.served_name, running.stack.front.url
    history = History()
    with Clients(
        url, model, prompts, history, count=given.clients, tokens=_TOKENS, seed=given.seed
    ):
        time.sleep(_BEFORE_S[0])
        took = deploy(folder, "restart", *what, "--name", NAME)["seconds"]
        time.sleep(_AFTER_S)
    found = history.verdicts(answers, _LATE_S)
    for one in history.named(("wrong", "lost", "late", "ended"), answers, _LATE_S):
        print(f"  restart: {one}", file=sys.stderr)
    return {
        "restarted": took, "requests": len(history.requests), "lost": found["lost"],
        "wrong": found["wrong"], "ended by an event": found["ended"], "late": found["late"],
    }  # fmt: skip


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--topology", default="2p2d")
    options.add_argument("--port", type=int, default=18000)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--only", choices=("kill", "pass", "restart"))
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--history", type=Path, help="folder for one line a request")
    given = options.parse_args()
    choice = random.Random(given.seed)  # noqa: S311 - the same ones each time
    prompts = [
        f"{number:02d} " + "".join(choice.choice("abcdefgh ") for _ in range(_CHARACTERS))
        for number in range(_PROMPTS)
    ]
    with (
        tempfile.TemporaryDirectory(prefix="pdkit-faults-") as folder,
        stack(Path(folder), given.topology, given.port) as started,
    ):
        home = Home.from_environ({"PDKIT_HOME": folder})
        running = require_stack(home, NAME)
        url, model = running.stack.front.url, running.prepared.plan.model.served_name
        answers = known_answers(url, model, prompts)
        print(f"starts: {json.dumps(started)}", flush=True)
        if given.only in (None, "restart"):
            engines = () if given.topology != "1p1d" else None
            for what in [one for one in (engines, ("router",), ("redis",)) if one is not None]:
                row = restart_under_load(home, Path(folder), what, answers, prompts, given)
                print(json.dumps(row), flush=True)
        for number in range(given.rounds):
            seed = given.seed + 100 * number
            for fault in faults_of(running) if given.only in (None, "pass") else ():
                row = pass_under_load(home, fault, answers, prompts, given, seed)
                print(json.dumps(row), flush=True)
            for service in running.stack.services if given.only in (None, "kill") else ():
                row = kill_under_load(home, service.name, answers, prompts, given, seed)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
