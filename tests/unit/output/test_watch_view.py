"""A watch's frames as people read them: golden screens, and what must hold of any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from deploy.metrics.events import Event, remembered
from deploy.metrics.frame import Frame
from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import ServiceReading, StackReading
from deploy.metrics.watching import next_frame
from deploy.output.watch_view import WIDTH, watch_view
from deploy.verify.hits import Tiers
from deploy.verify.store_path import Sample
from tests.unit.metrics.readings import BEGAN, page, reading, service, stats


def moved(operation: str, megabytes: float, chunks: float) -> MetricsPage:
    """Return what the Redis path counts after this much, at half a gigabyte a second."""
    labels = {"operation": operation}
    result = {"store": "stored", "load": "loaded"}[operation]
    return MetricsPage(
        (
            Sample("pdkit_store_bytes_total", labels, megabytes * 1e6),
            Sample("pdkit_store_seconds_total", labels, megabytes / 500),
            Sample("pdkit_store_chunks_total", {**labels, "result": result}, chunks),
            Sample("pdkit_store_calls_total", {"operation": "lookup"}, chunks),
            Sample("pdkit_store_seconds_total", {"operation": "lookup"}, chunks * 0.0004),
        )
    )


def joined(*pages: MetricsPage) -> MetricsPage:
    return MetricsPage(tuple(sample for one in pages for sample in one.samples))


def busy(second: float) -> list[ServiceReading]:
    """Return services of a stack in which 100 requests a second come."""
    n = 100 * second
    each = {"queries": 1024 * n, "prompt": 1024 * n, "answers": n, "first_count": n}
    prefill = page(**each, run=3, wait=2, kv=0.37, hits=256 * n, asked=768 * n, found=0, out=n,
                   first_sum=0.045 * n)  # fmt: skip
    decode = page(**each, run=41, wait=0, kv=0.62, hits=0, asked=1024 * n, found=1000 * n,
                  out=64 * n, first_sum=1.2 * n, waits=n)  # fmt: skip
    return [
        service("redis"),
        service("producer-0", joined(prefill, moved("store", 60 * second, 3 * n))),
        service("consumer-0", joined(decode, moved("load", 55 * second, 3 * n))),
        service("router", page(health=2, requests=n, errors=second)),
    ]


def busy_reading(second: float) -> StackReading:
    grown = stats(
        keys=400, used_memory_bytes=700 << 20, commands=int(900 * second),
        received_bytes=int(6e7 * second), sent_bytes=int(5.5e7 * second),
        evicted_keys=max(0, int(second) - 60),
    )  # fmt: skip
    return reading(second, *busy(second), store=grown)


def shown(*readings: StackReading, height: int | None = None) -> str:
    memory, recent = None, ()
    for one in readings:
        memory, frame = next_frame(memory, one)
        recent = remembered(recent, frame.events, 5)
    return watch_view(frame, recent, height=height)


SCREENS: dict[str, tuple[StackReading, ...]] = {
    "first": (busy_reading(0),),
    "busy": (busy_reading(0), busy_reading(62), busy_reading(64)),
    "died": (
        busy_reading(0),
        reading(
            2,
            *busy(2)[:2],
            service("consumer-0", condition="exited", pid=0),
            service("router", page(health=1, requests=205, errors=5)),
            store=None,
        ),
    ),
    "down": (busy_reading(0), reading(2, up=False, what="", store=None)),
    "trouble": (busy_reading(0), reading(2, up=False, what="", trouble="Docker does not answer")),
}


@pytest.mark.parametrize("name", SCREENS)
def test_each_screen_is_as_in_the_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"watch/{name}.txt", shown(*SCREENS[name]) + "\n")


@pytest.mark.parametrize("name", SCREENS)
def test_screens_fit_80_columns_and_24_lines(name: str) -> None:
    lines = shown(*SCREENS[name]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 24
    assert lines == [line.rstrip() for line in lines]


def many(engines: int, *, dead: int) -> StackReading:
    made = (service(f"consumer-{n}", page(run=n, kv=0.5)) for n in range(engines))
    return reading(
        0,
        *(replace(one, condition="exited") if n == dead else one for n, one in enumerate(made)),
    )


def test_the_tiers_of_lmcaches_server_fit_a_line() -> None:
    _, frame = next_frame(None, busy_reading(0))
    assert "tiers" not in watch_view(frame, ())
    for tiers in (Tiers(1000, local=1000, server=0, redis=0, computed=0), Tiers(0, 0, 0, 0, 0)):
        seen = replace(frame, watched=replace(frame.watched, tiers=tiers))
        (line,) = [one for one in watch_view(seen, ()).splitlines() if one.startswith("tiers")]
        assert line.endswith("(engines here)") and len(line) <= WIDTH
    assert line == "tiers    - (engines here)"


class TestHeight:
    def test_dead_engines_stay_visible_on_a_low_screen(self) -> None:
        text = shown(many(40, dead=33), height=24)
        assert len(text.splitlines()) <= 24
        assert "consumer-33  exited" in text
        assert "consumer-0 " in text
        assert "consumer-39" not in text
        left = sum(line.startswith("consumer-") for line in text.splitlines())
        assert f"and {40 - left} more engines" in text

    def test_all_engines_are_shown_if_there_is_room(self) -> None:
        assert "consumer-39" in shown(many(40, dead=33))
        assert "more engines" not in shown(many(40, dead=33), height=60)

    def test_one_engine_is_always_shown(self) -> None:
        assert "consumer-33  exited" in shown(many(40, dead=33), height=5)


class TestWidth:
    def test_the_largest_numbers(self) -> None:
        huge = dict.fromkeys(("queries", "hits", "asked", "found", "prompt", "out"), 10.0**12)
        late = page(**huge, run=9999, wait=9999, kv=1, first_count=1, first_sum=300)
        slow = page(queries=0, prompt=0, out=0, asked=0, found=0, hits=0)
        before = [service("producer-63", slow), service("consumer-63", condition="not started")]
        after = [service("producer-63", late), service("consumer-63", condition="not started")]
        line = shown(reading(0, *before), reading(1, *after)).splitlines()[5]
        assert line.startswith("producer-63")
        assert line.split()[-2:] == ["300", "s"], "the last column is whole"
        assert len(line) <= WIDTH

    def test_a_long_trouble(self) -> None:
        text = shown(busy_reading(0), reading(2, up=False, trouble="Docker says no. " * 9))
        assert max(map(len, text.splitlines())) == WIDTH

    def test_a_long_name_and_a_long_event(self) -> None:
        _, frame = next_frame(None, busy_reading(0))
        long = replace(frame, name="n" * 40, what=f"1p1d, {'m' * 80}, http://x")
        text = watch_view(long, [event("word " * 40, count=1234)])
        assert max(map(len, text.splitlines())) <= WIDTH
        assert text.endswith("… (1234 times)")


def event(text: str, count: int = 1) -> Event:
    return Event(BEGAN, "error", "consumer-0", text, count)


class TestWords:
    @pytest.fixture
    def frame(self) -> Frame:
        return next_frame(None, reading(0, store=stats(max_memory_bytes=0)))[1]

    def test_a_redis_without_a_limit(self, frame: Frame) -> None:
        assert "8 MiB of no limit, 14 keys" in watch_view(frame, ())

    def test_a_redis_that_tells_nothing(self) -> None:
        blind = stats(keys=None, used_memory_bytes=None, max_memory_bytes=None, clients=None)
        text = watch_view(next_frame(None, reading(0, store=blind))[1], ())
        assert "? of ?, ? keys, ? clients" in text

    def test_a_redis_that_does_not_answer(self) -> None:
        assert "redis    does not answer" in shown(reading(0, store=None))

    def test_there_is_no_path_line_without_the_redis_path(self, frame: Frame) -> None:
        assert "path" not in watch_view(frame, ())

    def test_events_say_when_who_and_how_often(self, frame: Frame) -> None:
        text = watch_view(frame, [event("OSError: no", 3)])
        assert text.splitlines()[-1] == "12:00:00  consumer-0: ERROR OSError: no (3 times)"
