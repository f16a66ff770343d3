"""What is told of two readings, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.metrics.events import Event, remembered
from deploy.metrics.reading import Complaint, ServiceCondition, StackReading
from deploy.metrics.watching import next_frame
from tests.unit.metrics.readings import BEGAN, page, reading, service, stats


def events(*readings: StackReading) -> list[tuple[str, str]]:
    """Return kind and subject of what the last of these readings tells."""
    memory = None
    for one in readings:
        memory, frame = next_frame(memory, one)
    return [(event.kind, event.about) for event in frame.events]


def change(was: tuple[ServiceCondition, int], now: tuple[ServiceCondition, int]) -> list[str]:
    first, second = (
        reading(n, service("consumer-0", condition=condition, pid=pid))
        for n, (condition, pid) in enumerate((was, now))
    )
    return [kind for kind, _ in events(first, second)]


class TestServices:
    @pytest.mark.parametrize(
        ("was", "now", "told"),
        [
            (("ready", 1), ("ready", 1), []),
            (("ready", 1), ("exited", 0), ["exited"]),
            (("exited", 0), ("exited", 0), []),
            (("exited", 0), ("not ready", 2), ["restarted"]),
            (("not ready", 2), ("ready", 2), ["ready"]),
            (("ready", 1), ("ready", 2), ["restarted"]),
            (("ready", 1), ("not ready", 2), ["restarted"]),
            (("ready", 1), ("not ready", 1), ["not_ready"]),
            (("exited", 0), ("ready", 2), ["restarted", "ready"]),
            (("ready", 1), ("not started", 0), ["gone"]),
        ],
    )
    def test_a_changed_service_is_an_event(
        self, was: tuple[ServiceCondition, int], now: tuple[ServiceCondition, int], told: list[str]
    ) -> None:
        assert change(was, now) == told

    def test_the_first_reading_has_no_events(self) -> None:
        assert events(reading(0, service("consumer-0", condition="exited"))) == []


class TestStack:
    def test_a_stack_that_goes_down_is_one_event(self) -> None:
        up = reading(0, service("consumer-0"), service("router"))
        assert events(up, reading(2, up=False, store=None)) == [("down", "stack")]

    def test_a_stack_that_comes_up_is_one_event(self) -> None:
        assert events(reading(0, up=False), reading(2, service("redis"))) == [("up", "stack")]


class TestStore:
    def test_a_restarted_redis_is_an_event(self) -> None:
        assert events(reading(0), reading(2, store=stats(run_id="b"))) == [
            ("redis_restarted", "redis")
        ]
        assert events(reading(0), reading(2, store=None), reading(4)) == [], (
            "it did not answer once"
        )
        assert events(reading(0), reading(2, store=None), reading(4, store=stats(run_id="b"))) == [
            ("redis_restarted", "redis")
        ]

    def test_unknown_lives_are_not_restarts(self) -> None:
        assert events(reading(0), reading(2, store=stats(run_id=None))) == []

    def test_a_flushed_redis_is_an_event(self) -> None:
        assert events(reading(0), reading(2, store=stats(flushes=2))) == [
            ("redis_flushed", "redis")
        ]

    def test_evictions_are_an_event_when_they_begin(self) -> None:
        steps = [
            reading(n, store=stats(evicted_keys=keys)) for n, keys in enumerate((0, 5, 9, 9, 12))
        ]
        told = [("evictions", "redis")]
        assert [events(*steps[: n + 1]) for n in range(5)] == [[], told, [], [], told]

    def test_a_user_supplied_redis_has_ready_events(self) -> None:
        here, gone = reading(0, user_redis=True), reading(2, user_redis=True, store=None)
        assert events(here, gone) == [("not_ready", "redis")]
        assert events(here, gone, replace(here, clock_s=9.0)) == [("ready", "redis")]


class TestPath:
    @pytest.mark.parametrize(
        ("samples", "kind"),
        [
            ({"load_corrupt": 2}, "refused"),
            ({"load_foreign": 2}, "refused"),
            ({"load_gone": 2}, "not_loaded"),
            ({"store_refused": 2}, "not_stored"),
        ],
    )
    def test_lost_chunks_are_events(self, samples: dict[str, float], kind: str) -> None:
        sound = page(load_loaded=10, store_stored=10)
        bad = page(load_loaded=20, store_stored=20, **samples)
        before = reading(0, service("consumer-0", sound))
        memory, _ = next_frame(None, before)
        memory, frame = next_frame(memory, reading(2, service("consumer-0", bad)))
        (event,) = frame.events
        assert (event.kind, event.about, event.count) == (kind, "consumer-0", 2)
        _, after = next_frame(memory, reading(4, service("consumer-0", bad)))
        assert after.events == (), "it is not told twice"

    def test_loaded_and_stored_chunks_are_no_events(self) -> None:
        first, second = (
            reading(
                n, service("consumer-0", page(load_loaded=n, store_stored=n, lookup_hit=n, waits=n))
            )
            for n in (1, 2)
        )
        assert events(first, second) == []


class TestLogs:
    WARNING = Complaint("consumer-0", "warning", "that is odd")
    ERROR = Complaint("consumer-0", "error", "OSError: no")

    def told(self, *complaints: Complaint, condition: ServiceCondition = "ready") -> list[str]:
        made = service("consumer-0", condition=condition)
        return [
            kind for kind, _ in events(reading(0, made), reading(2, made, complaints=complaints))
        ]

    def test_warnings_and_errors_of_a_serving_engine_are_events(self) -> None:
        assert self.told(self.WARNING, self.ERROR) == ["warning", "error"]

    def test_only_errors_of_a_starting_engine_are_events(self) -> None:
        assert self.told(self.WARNING, self.ERROR, condition="not ready") == ["error"]

    def test_the_last_error_of_a_dead_engine_is_an_event(self) -> None:
        before = reading(0, service("consumer-0"))
        after = reading(2, service("consumer-0", condition="exited"), complaints=(self.ERROR,))
        assert events(before, after) == [("exited", "consumer-0"), ("error", "consumer-0")]


class TestRemembered:
    @staticmethod
    def event(text: str, about: str = "consumer-0", count: int = 1) -> Event:
        return Event(BEGAN, "warning", about, text, count)

    def test_the_newest_events_are_kept(self) -> None:
        old = [self.event(word) for word in "abcde"]
        assert [e.text for e in remembered(old, [self.event("f")], 5)] == list("bcdef")

    def test_events_that_differ_by_numbers_are_merged(self) -> None:
        old = [self.event("lost chunk 17", count=2), self.event("other")]
        kept = remembered(old, [self.event("lost chunk 4")], 5)
        assert [(e.text, e.count) for e in kept] == [("other", 1), ("lost chunk 4", 3)]

    def test_events_of_other_services_are_not_merged(self) -> None:
        assert len(remembered([self.event("x", "a")], [self.event("x", "b")], 5)) == 2
