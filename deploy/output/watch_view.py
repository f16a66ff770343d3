"""A frame of `deploy status --watch`, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from textwrap import shorten

from deploy.metrics.events import Event
from deploy.metrics.frame import EngineFrame, Frame, StoreFrame
from deploy.output.table import duration, percent, table, told
from deploy.verify.hits import Tiers

WIDTH = 80
EVENTS = 5
_UNKNOWN = "-"
_HEADER = ("engine", "state", "run", "wait", "KV", "local", "store", "in/s", "out/s", "TTFT")
_AROUND_ENGINES = 3  # lines: an empty one, and the table's header
_LOSSES = ("refused", "not loaded", "not stored", "failures", "late")


def watch_view(frame: Frame, recent: Sequence[Event], height: int | None = None) -> str:
    """Return a frame, and the events that were remembered up to it, as lines of 80 characters.

    `height` limits the number of lines; ready engines are left out if there is no room.
    """
    what = f"stack '{frame.name}'" + (f": {frame.what}" if frame.what else "")
    above = [_cut(what, WIDTH), _when(frame)]
    below = [*(_now(frame) if frame.up else ()), *(_since(frame) if frame.up else ())]
    below += ["", *(_event_line(event) for event in recent[-EVENTS:])] if recent else []
    room = None if height is None else height - len(above) - len(below) - _AROUND_ENGINES
    engines = ["", *_engines(frame.engines, room)] if frame.engines else []
    return "\n".join(line[:WIDTH].rstrip() for line in (*above, *engines, *below))


def _when(frame: Frame) -> str:
    if frame.trouble:
        return f"{frame.at:%H:%M:%S}  cannot read its state:  {frame.trouble}"
    if not frame.up:
        return f"{frame.at:%H:%M:%S}  not up; waiting for it"
    if not frame.seconds:
        return f"{frame.at:%H:%M:%S}  rates and hits begin with the next frame"
    return f"{frame.at:%H:%M:%S}  rates and hits of the last {frame.seconds:.1f} s"


def _engines(engines: Sequence[EngineFrame], room: int | None) -> list[str]:
    """Return the table of engines; if there is no room, ready ones are left out first."""
    shown = list(engines)
    if room is not None and len(shown) > room:
        room = max(1, room - 1)
        kept = sorted(range(len(shown)), key=lambda at: (shown[at].condition == "ready", at))[:room]
        shown = [shown[at] for at in sorted(kept)]
    lines = table(_HEADER, [_row(engine) for engine in shown], right=_HEADER[2:]).splitlines()
    hidden = len(engines) - len(shown)
    return [*lines, f"and {hidden} more engines"] if hidden else lines


def _row(engine: EngineFrame) -> tuple[object, ...]:
    load, counts = engine.load, engine.counts
    first = counts.first_token.mean_s if counts else None
    return (
        engine.name,
        engine.condition,
        load.running if load else _UNKNOWN,
        load.waiting if load else _UNKNOWN,
        f"{100 * load.kv_use:.0f}%" if load else _UNKNOWN,
        _narrow(counts.cache.local_rate if counts else None),
        _narrow(counts.cache.external_rate if counts else None),
        _short(engine.prompt_tokens_s),
        _short(engine.generation_tokens_s),
        _UNKNOWN if first is None else _seconds(first),
    )


def _now(frame: Frame) -> list[str]:
    """Describe Redis, the path to it and the router in the last interval."""
    path, router = frame.counts.path, frame.router
    lines = ["", *(_store_lines(frame.store) if frame.shares_kv else [])]
    if path is not None:
        lines.append(
            f"path     stored {_megabytes(path.stored_bytes)}{_speed(path.store_gb_s)}, "
            f"loaded {_megabytes(path.loaded_bytes)}{_speed(path.load_gb_s)}, "
            f"lookup {_milliseconds(path.lookup_s, path.lookups)}"
        )
    if router is not None:
        errors = _UNKNOWN if router.counts is None else f"{router.counts.errors:.0f}"
        lines.append(
            f"router   {_short(router.requests_s)} requests/s, {errors} errors; "
            f"{router.view.healthy} of {router.view.engines} engines healthy"
        )
    return lines


def _store_lines(store: StoreFrame | None) -> list[str]:
    if store is None:
        return ["redis    does not answer"]
    stats, interval = store.stats, store.interval
    memory = stats.memory
    share = f" ({percent(memory.share)})" if memory.share else ""
    line = f"redis    {memory}{share}, {told(stats.keys)} keys, "
    lines = [f"{line}{told(stats.clients)} clients"]
    if interval is not None:
        received, sent = interval.rate(interval.received_bytes), interval.rate(interval.sent_bytes)
        lines.append(
            f"         {_megabytes(received)}/s in, {_megabytes(sent)}/s out, "
            f"{_short(interval.rate(interval.commands))} commands/s, "
            f"{told(interval.evicted_keys)} keys evicted"
        )
    return lines


def _since(frame: Frame) -> list[str]:
    """Describe the totals since the watch began."""
    watched, path, router = frame.watched, frame.watched.path, frame.router
    began = frame.at - timedelta(seconds=frame.watched_s)
    requests = (
        f", {router.watched.requests:.0f} requests, {router.watched.errors:.0f} errors"
        if router
        else ""
    )
    evicted = f", {frame.store.evicted_keys} keys evicted" if frame.store else ""
    lines = [
        "",
        f"since {began:%H:%M:%S}, {duration(frame.watched_s)}: {watched.answers:.0f} answers"
        f"{requests}{evicted}",
        f"hits     store {_rate(watched.cache.external_rate)} (consumers), "
        f"local {_rate(watched.cache.local_rate)}",
        *(_tiers(watched.tiers) if watched.tiers else []),
    ]
    if path is not None:
        lost = (path.refused, path.not_loaded, path.left_out, path.failures, path.late)
        told_of = ", ".join(f"{n:.0f} {what}" for n, what in zip(lost, _LOSSES, strict=True))
        waited = _milliseconds(path.wait_s, path.waits)
        lines += [
            f"path     {told_of}",
            f"         {path.waits:.0f} answers waited for their stores, {waited} each",
        ]
    return lines


def _tiers(tiers: Tiers) -> list[str]:
    parts = {
        "local": tiers.local,
        "server": tiers.server,
        "Redis": tiers.redis,
        "computed": tiers.computed,
    }
    shares = (f"{name} {percent(n / tiers.asked)}" for name, n in parts.items() if tiers.asked)
    return [f"tiers    {', '.join(shares) or _UNKNOWN} (engines here)"]


def _event_line(event: Event) -> str:
    head = f"{event.at:%H:%M:%S}  {event.about}: "
    times = f" ({event.count} times)" if event.count > 1 else ""
    mark = {"warning": "WARNING ", "error": "ERROR "}.get(event.kind, "")
    return f"{head}{_cut(mark + event.text, WIDTH - len(head) - len(times))}{times}"


def _cut(text: str, width: int) -> str:
    return shorten(text, width, placeholder=" …") if len(text) > width else text


def _rate(rate: float | None) -> str:
    return _UNKNOWN if rate is None else percent(rate)


def _narrow(rate: float | None) -> str:
    return _rate(rate).replace(" ", "")


def _short(number: float | None) -> str:
    """Return a number in at most five characters."""
    if number is None:
        return _UNKNOWN
    if number < 100:
        return f"{number:.1f}".removesuffix(".0") if number else "0"
    for unit in ("", "k", "M"):
        if number < 9999.5:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.0f}G"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99 else f"{seconds:.0f} s"


def _milliseconds(seconds: float, count: float) -> str:
    return f"{1e3 * seconds / count:.1f} ms" if count else _UNKNOWN


def _megabytes(number: float | None) -> str:
    """Return bytes as MB or GB, in at most seven characters."""
    if number is None:
        return "?"
    megabytes = number / 1e6
    if megabytes >= 1000:
        return f"{megabytes / 1000:.1f} GB"
    return f"{megabytes:.1f} MB" if megabytes < 100 else f"{megabytes:.0f} MB"


def _speed(gb_s: float) -> str:
    return f" at {gb_s:.2f} GB/s" if gb_s else ""
