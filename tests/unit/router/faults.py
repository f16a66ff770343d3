"""Faults under load on stand-in engines: `python -m tests.unit.router.faults --trials 1000`.

A router, 24 producers and 24 consumers that answer by the prompt, and clients whose every
request is judged afterwards (`bench/faults`). Each trial is one fault, at a moment by a seed.
With `--handoff direct` producers answer with parameters, and a consumer answers wrong where they
come a second time, or with another prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.faults.clients import Clients
from bench.faults.history import BAD, Asked, History, verdict
from tests.ports import unused_port
from tests.unit.router import stand_in
from tests.unit.router.conftest import ROUTER
from tests.unit.router.stand_in import Connection, Loop, StandIn

ENGINES, CLIENTS, LATE_S = 24, 4, 60.0
_REQUESTS_A_TRIAL = 2  # end before the next trial begins
PROMPTS = tuple(f"prompt {number}" for number in range(8))


def answer_to(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


ANSWERS = {number: answer_to(prompt) for number, prompt in enumerate(PROMPTS)}


@dataclass
class Blocks:
    """What producers hold for consumers: the prompt of each hand-off, until it is read.

    Attributes:
        read: how many were.
    """

    read: int = 0
    _prompts: dict[str, str] = field(default_factory=dict)

    def prepare(self, name: str, prompt: str) -> dict[str, str | bool]:
        assert name not in self._prompts, "two requests with one id"
        self._prompts[name] = prompt
        return {"do_remote_prefill": True, "remote_request_id": name}

    def load(self, params: dict[str, str], prompt: str) -> bool:
        """Tell whether they are of this prompt; whoever reads them later gets another's."""
        self.read += 1
        return self._prompts.pop(params["remote_request_id"], None) == prompt


BLOCKS = Blocks()


async def by_prompt(engine: StandIn, to: Connection) -> None:
    """Answer in four pieces with a pause between them, or whole after the same time."""
    engine.seen.clear()  # nobody reads them, and there are many
    body = to.asked.json
    text = answer_to(body["prompt"])
    params = body.get("kv_transfer_params") or {}
    if params.get("do_remote_decode"):
        await asyncio.sleep(0.01)
        made = BLOCKS.prepare(to.asked.headers["x-request-id"], body["prompt"])
        await to.whole(200, json.dumps({"kv_transfer_params": made}).encode())
        return
    if params and not BLOCKS.load(params, body["prompt"]):
        text = answer_to(f"not {text}")
    if not body.get("stream"):
        await asyncio.sleep(0.01)
        await to.whole(200, json.dumps({"choices": [{"text": text}]}).encode())
        return
    await to.begin()
    for at in range(0, len(text), 16):
        await to.piece(
            f"data: {json.dumps({'choices': [{'text': text[at : at + 16]}]})}\n\n".encode()
        )
        await asyncio.sleep(0.003)
    await to.piece(stand_in.DONE)
    await to.send(b"0\r\n\r\n")


@dataclass
class Bed:
    """What faults are done to."""

    loop: Loop
    engines: tuple[StandIn, ...]
    listening: socket.socket
    choice: random.Random
    history: History = field(default_factory=History)
    ends: list[tuple[float, float]] = field(default_factory=list)  # of routers
    router: subprocess.Popen[bytes] | None = None
    log: str = os.devnull
    drained: Path | None = None
    options: tuple[str, ...] = ()
    metrics_port: int = field(default_factory=unused_port)

    @property
    def port(self) -> int:
        return int(self.listening.getsockname()[1])

    def start_router(self) -> None:
        held = self.listening.fileno()
        named = [
            part
            for engine in self.engines
            for part in (f"--{engine.name.split('-')[0]}", f"{engine.name}=127.0.0.1:{engine.port}")
        ]
        drains = ("--drain-file", str(self.drained)) if self.drained else ()
        log = Path(self.log).open("wb")  # noqa: SIM115 - closed below
        self.router = subprocess.Popen(
            (
                sys.executable, "-m", "pdkit_router", "--host", "127.0.0.1", "--port", "1",
                "--metrics-host", "127.0.0.1", "--metrics-port", str(self.metrics_port),
                *named, *drains, *self.options,
            ),
            env={"PYTHONPATH": ROUTER, "PDKIT_LISTEN_FD": str(held)},
            pass_fds=(held,),
            stderr=log,
        )  # fmt: skip
        log.close()

    def end_router(self, number: signal.Signals) -> None:
        assert self.router is not None
        began = time.monotonic()
        self.router.send_signal(number)
        self.router.wait(30)
        self.ends.append((began, time.monotonic()))

    def await_requests(self, count: int) -> None:
        """Wait until so many more requests have ended."""
        enough = len(self.history.requests) + count
        while len(self.history.requests) < enough:
            time.sleep(0.002)

    def await_gauge(self, name: str, engine: StandIn, value: int) -> None:
        """Wait until the router's page says so of an engine."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        line = re.compile(rf'(?m)^pdkit_router_engine_{name}{{engine="{engine.name}",.*}} {value}$')
        until = time.monotonic() + 60
        while not line.search(httpx.get(url, trust_env=False, timeout=60).text):
            if time.monotonic() > until:
                raise AssertionError(f"{engine.name} is not {name} {value}")
            time.sleep(0.02)

    def pause(self, most_s: float) -> None:
        time.sleep(self.choice.uniform(0, most_s))


def kill_engine(bed: Bed, engine: StandIn) -> None:
    engine.kill()
    bed.pause(0.01)
    engine.start()


def break_off(bed: Bed, engine: StandIn) -> None:
    engine.drop_idle()
    bed.pause(0.01)


async def kill_at_once(*engines: StandIn) -> None:
    """Leave no time for a request to break two engines, of which a third is not tried."""
    for one in engines:
        await one._kill()


def kill_two(bed: Bed, engine: StandIn) -> None:
    others = [one for one in bed.engines if one is not engine]
    two = (engine, bed.choice.choice(others))
    bed.loop.run(kill_at_once(*two))
    bed.pause(0.01)
    for one in two:
        one.start()


def restart_drained(bed: Bed, engine: StandIn) -> None:
    """Do to one engine what a rolling restart does to each in turn."""
    assert bed.drained is not None
    bed.drained.write_text(f"{engine.name}\n")
    bed.await_gauge("drained", engine, 1)
    bed.await_gauge("busy", engine, 0)
    engine.kill()
    bed.pause(0.01)
    engine.start()
    bed.drained.write_text("")
    bed.await_gauge("drained", engine, 0)


def fail(bed: Bed, engine: StandIn) -> None:
    engine.does = stand_in.fails
    bed.pause(0.02)
    engine.does = by_prompt


def kill_router(bed: Bed, _: StandIn) -> None:
    bed.end_router(signal.SIGKILL)
    bed.start_router()
    _answers(bed.port)


def restart_router(bed: Bed, _: StandIn) -> None:
    bed.end_router(signal.SIGTERM)
    bed.start_router()
    _answers(bed.port)


FAULTS: dict[str, Callable[[Bed, StandIn], None]] = {
    "engine killed": kill_engine,
    "two engines killed": kill_two,
    "engine killed, log on a full disk": kill_engine,
    "engine drained and restarted": restart_drained,
    "connections closed": break_off,
    "engine answers 500": fail,
    "router killed": kill_router,
    "router restarted": restart_router,
}


# So few that some wait, and so short that what is left of a killed consumer is soon forgotten.
HANDOFFS: dict[str, tuple[str, ...]] = {
    "store": (),
    "direct": ("--handoff", "direct", "--max-handoffs", "2", "--handoff-lease-s", "0.5"),
}


@contextmanager
def bed_of(
    loop: Loop, seed: int, log: str = os.devnull, options: tuple[str, ...] = ()
) -> Iterator[Bed]:
    """Set engines and a router that writes to `log` up, for the length of a block."""
    roles = ("producer", "consumer")
    engines = tuple(StandIn(loop, f"{role}-{n}") for n in range(ENGINES) for role in roles)
    for engine in engines:
        engine.does = by_prompt
    with (
        socket.create_server(("127.0.0.1", 0), backlog=256) as listening,
        tempfile.TemporaryDirectory() as folder,
    ):
        drained = Path(folder) / "drained.json"
        bed = Bed(loop, engines, listening, random.Random(seed), log=log, drained=drained,
                  options=options)  # fmt: skip
        bed.start_router()
        try:
            _answers(bed.port)
            yield bed
        finally:
            bed.end_router(signal.SIGKILL)
            for engine in engines:
                engine.kill()


def run(
    loop: Loop, fault: str, trials: int, seed: int, handoff: str = "store"
) -> tuple[Counter[str], list[Asked]]:
    """Do a fault again and again under load; return the verdicts, and what went wrong.

    What was in flight when a router was killed, and broke off, is named "cut" and expected.
    "handed over" is not a verdict: so many requests were decoded from a producer's blocks.
    """
    log = "/dev/full" if "full disk" in fault else os.devnull
    read = BLOCKS.read
    with bed_of(loop, seed, log, HANDOFFS[handoff]) as bed:
        history = bed.history
        clients = Clients(
            f"http://127.0.0.1:{bed.port}",
            "m",
            PROMPTS,
            history,
            count=CLIENTS,
            tokens=4,
            seed=seed,
        )
        with clients:
            for trial in range(trials):
                bed.pause(0.01)
                FAULTS[fault](bed, bed.engines[trial % len(bed.engines)])
                bed.await_requests(_REQUESTS_A_TRIAL)
    judged = [(verdict(one, ANSWERS, LATE_S), one) for one in history.requests]
    verdicts = Counter[str](told for told, _ in judged)
    bad = [one for told, one in judged if told in BAD]
    if fault == "router killed":
        cut = [
            one for one in bad
            if not one.text or ANSWERS[one.prompt].startswith(one.text)
            if any(one.sent_s <= last and first <= one.ended_s for first, last in bed.ends)
        ]  # fmt: skip
        bad = [one for one in bad if one not in cut]
        verdicts["lost"] -= len(cut)
        verdicts["cut"] = len(cut)
    if handoff == "direct":
        verdicts["handed over"] = BLOCKS.read - read
    return verdicts, bad


def _answers(port: int) -> None:
    url = f"http://127.0.0.1:{port}/readiness"
    until = time.monotonic() + 60
    while httpx.get(url, trust_env=False, timeout=60).status_code != 200:
        if time.monotonic() > until:
            raise AssertionError("the router is not ready")
        time.sleep(0.02)


def main() -> None:
    """Do all faults, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trials", type=int, default=100)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--fault", choices=list(FAULTS), nargs="+", default=list(FAULTS))
    options.add_argument("--handoff", choices=list(HANDOFFS), default="store")
    given = options.parse_args()
    loop = Loop()
    for fault in given.fault:
        verdicts, bad = run(loop, fault, given.trials, given.seed, given.handoff)
        print(f"{fault}: {given.trials} trials, {dict(verdicts)}", *bad, sep="\n  ", flush=True)
    loop.close()


if __name__ == "__main__":
    main()
