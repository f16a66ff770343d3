"""Send each request to a producer, then to a consumer; or to one aggregated engine.

Prefill first: a copy of the request that asks for one token goes to a producer, which answers when
the prompt's KV can be loaded. Then the request itself goes to a consumer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop

from pdkit_router.handoff import Admission, Handoff
from pdkit_router.handoff.direct import DirectHandoff
from pdkit_router.handoff.store import StoreHandoff
from pdkit_router.membership import ROLES, Discovery, Drains, source
from pdkit_router.metrics import FrontDoor, MetricsDoor, RouterMetrics
from pdkit_router.request import Doorkeeper
from pdkit_router.route import Forwarder, Group, PrefixGroup
from pdkit_router.serve import ClientLimits, Clients
from pdkit_router.tracing import Tracer
from pdkit_router.upstream import Engine, HealthChecker

_BACKLOG = 1024
_MIB = 2**20
_LEAVE_S = 10.0
_LEAVE_IDLE_S = 1.0  # for clients that are about to send their next request
# A listening socket that outlives the router, so that clients wait while it is started again.
_LISTEN_ENV = "PDKIT_LISTEN_FD"
_FILES_A_CLIENT = 3
HANDOFFS: Mapping[str, Handoff] = {one.name: one for one in (StoreHandoff(), DirectHandoff())}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the router's arguments."""
    options = argparse.ArgumentParser(prog="pdkit_router", allow_abbrev=False)
    options.add_argument("--host", required=True)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--metrics-host", required=True)
    options.add_argument("--metrics-port", type=int, required=True)
    for role in ROLES:
        options.add_argument(
            f"--{role}", action="append", default=[], metavar="NAME=HOST:PORT", type=_engine
        )
    options.add_argument(
        "--engines-from",
        action="append",
        default=[],
        type=source,
        metavar="dns://HOST:PORT?role=ROLE",
        help="DNS name that resolves to all engines of a role; repeatable",
    )
    options.add_argument(
        "--follow-prefixes", action="store_true",
        help="send a prompt to the --engine that has served its prefix",
    )  # fmt: skip
    options.add_argument("--key-file", type=Path, help="file with the key that clients must send")
    options.add_argument(
        "--engine-key-file", type=Path, help="file with the key that engines require"
    )
    options.add_argument("--drain-file", type=Path, help="file with the names of drained engines")
    options.add_argument("--degrade", choices=("recompute", "refuse"), default="recompute")
    options.add_argument(
        "--handoff", choices=list(HANDOFFS), default=StoreHandoff.name,
        help="how KV gets from a producer to a consumer",
    )  # fmt: skip
    options.add_argument(
        "--max-handoffs", type=int, default=32, metavar="N",
        help="direct hand-offs of a producer that may hold its KV blocks at once",
    )  # fmt: skip
    options.add_argument(
        "--handoff-lease-s", type=float, default=30.0, metavar="S",
        help="seconds that a producer holds the blocks of a hand-off that nobody reads",
    )  # fmt: skip
    options.add_argument(
        "--otlp-endpoint", metavar="http://HOST:PORT", help="send traces to this collector"
    )
    options.add_argument("--stack", default="", help="its name, in traces")
    options.add_argument(
        "--max-body-mib", type=int, default=64, help="largest body of a request, in MiB"
    )
    options.add_argument("--answer-s", type=float, default=1800.0)
    options.add_argument(
        "--leave-s", type=float, default=_LEAVE_S, help="seconds for requests to end after SIGTERM"
    )
    return options


def _engine(text: str) -> Engine:
    name, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    if not (name and host and port.isdigit()):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=HOST:PORT")
    return Engine(name, host.removeprefix("[").removesuffix("]"), int(port))


def _limits(body_bytes: int) -> ClientLimits:
    """Return the limits, with no more connections than this process may have files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = max(soft, hard) if hard != resource.RLIM_INFINITY else 2**20
    limits = ClientLimits(body_bytes=body_bytes)
    limits.held_bytes = max(limits.held_bytes, 2 * body_bytes)
    limits.connections = min(limits.connections, max(16, (files - 64) // _FILES_A_CLIENT))
    return limits


async def _run(given: argparse.Namespace, key: str, engine_key: str) -> None:
    loop = asyncio.get_running_loop()
    found = {one.role for one in given.engines_from}
    aggregated = PrefixGroup if given.follow_prefixes else Group
    forwarder = Forwarder(
        Group(given.producer),
        aggregated(given.engine)
        if given.engine or "engine" in found
        else Group(given.consumer, slips=True),
        given.degrade,
        given.answer_s,
        Counter(),
        HANDOFFS[given.handoff],
        Admission(given.max_handoffs, given.handoff_lease_s),
    )
    if given.otlp_endpoint:
        forwarder.tracer = Tracer(given.otlp_endpoint, given.stack, forwarder.counts)
    limits = _limits(given.max_body_mib * _MIB)
    clients = Clients(limits, Doorkeeper(key), FrontDoor(forwarder).serve)
    watchers = Clients(ClientLimits(connections=64), MetricsDoor(), RouterMetrics(forwarder).serve)
    engines = (*given.producer, *given.consumer, *given.engine)
    for engine in engines:
        engine.key = engine_key

    def learn(context: int) -> None:
        forwarder.context = context

    checker = HealthChecker(engines, learn)
    discoveries = [
        Discovery(one, forwarder.producers if one.role == "producer" else forwarder.consumers,
                  checker, engine_key)
        for one in given.engines_from
    ]  # fmt: skip
    left = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, left.set)
    drains = Drains(given.drain_file, engines) if given.drain_file else None
    if drains:
        drains.read()
    watching: asyncio.Future[Any] = asyncio.gather(
        checker.run(), *(one.run() for one in discoveries), *([drains.run()] if drains else [])
    )
    tracing = asyncio.ensure_future(forwarder.tracer.run()) if forwarder.tracer else None
    metrics = await loop.create_server(watchers.connection, given.metrics_host, given.metrics_port)
    # A client that waited must not be told that there is no engine.
    first_round: asyncio.Future[Any] = asyncio.gather(
        checker.asked.wait(), *(one.asked.wait() for one in discoveries)
    )
    await asyncio.wait({first_round, watching}, return_when=asyncio.FIRST_COMPLETED)
    gc.freeze()  # modules and all else that stays: no collection looks at it again
    front = await _listen(clients, given.host, given.port)
    leaving: asyncio.Future[Any] = asyncio.ensure_future(left.wait())
    await asyncio.wait({leaving, watching}, return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        watching.result()  # without it an engine's return would go unnoticed
    front.close()
    clients.leaving = True
    await _emptied(clients, given.leave_s)
    if tracing and forwarder.tracer:
        tracing.cancel()
        await forwarder.tracer.leave()
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    metrics.close()


async def _listen(clients: Clients, host: str, port: int) -> asyncio.Server:
    """Serve clients, on the socket that was inherited or on one of this process' own."""
    loop = asyncio.get_running_loop()
    inherited = os.environ.get(_LISTEN_ENV)
    if inherited is None:
        return await loop.create_server(clients.connection, host, port, backlog=_BACKLOG)
    waiting = socket.socket(fileno=int(inherited))
    return await loop.create_server(clients.connection, sock=waiting, backlog=_BACKLOG)


async def _emptied(clients: Clients, leave_s: float) -> None:
    """Let requests end that are being answered, and those come that are on their way."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    idle_until, until = now + _LEAVE_IDLE_S, now + leave_s
    while (now < until and clients.busy) or (now < idle_until and clients.waiting):
        await asyncio.sleep(0.02)
        now = loop.time()


def _key(options: argparse.ArgumentParser, file: Path | None) -> str:
    key = file.read_text(encoding="utf-8").strip() if file else ""
    if file and not key:
        options.error(f"{file} holds no key")
    return key


def main() -> None:
    """Run the router until it is told to stop."""
    options = parser()
    given = options.parse_args()
    found = {one.role for one in given.engines_from}
    has = {role: role in found or bool(getattr(given, role)) for role in ROLES}
    if (has["producer"] and has["consumer"]) == has["engine"]:
        options.error("either --producer and --consumer, or --engine; or --engines-from of each")
    if has["engine"] and given.handoff != StoreHandoff.name:
        options.error(f"--handoff {given.handoff} needs --producer and --consumer")
    if given.max_handoffs < 1:
        options.error("--max-handoffs must be at least 1")
    key, engine_key = _key(options, given.key_file), _key(options, given.engine_key_file)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    uvloop.run(_run(given, key, engine_key))


if __name__ == "__main__":
    main()
