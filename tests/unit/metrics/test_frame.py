"""Frames of a watch: rates, hits and sums from readings, through restarts and silence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deploy.metrics.frame import Frame
from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import ServiceReading, StackReading
from deploy.metrics.watching import next_frame
from deploy.verify.hits import Tiers
from deploy.verify.store_path import Sample
from tests.unit.metrics.readings import page, reading, service, stats


def frames(*readings: StackReading) -> list[Frame]:
    memory, made = None, []
    for one in readings:
        memory, frame = next_frame(memory, one)
        made.append(frame)
    return made


def last(*readings: StackReading) -> Frame:
    return frames(*readings)[-1]


def consumer(frame: Frame) -> dict[str, object]:
    (found,) = [one.as_dict() for one in frame.engines if one.name == "consumer-0"]
    return found


OLD = page(prompt=1000, out=100, asked=1000, found=900, queries=2000, hits=1000, answers=10)
NEW = page(prompt=1400, out=160, asked=1100, found=925, queries=2400, hits=1300, answers=14, run=3)


class TestEngines:
    def test_the_first_frame_knows_the_load_and_no_rates(self) -> None:
        frame = last(reading(0, service("consumer-0", page(run=2, wait=1, kv=0.5, prompt=1000))))
        shown = consumer(frame)
        assert shown["load"] == {"running": 2, "waiting": 1, "kv_use": 0.5}
        assert shown["interval"] is None
        assert shown["watch"]["prompt_tokens"] == 0, "what was before belongs to no watch"
        assert frame.seconds == 0

    def test_rates_and_hits_are_those_of_the_interval(self) -> None:
        frame = last(reading(0, service("consumer-0", OLD)), reading(4, service("consumer-0", NEW)))
        interval = consumer(frame)["interval"]
        assert interval["seconds"] == 4
        assert (interval["prompt_tokens_s"], interval["generation_tokens_s"]) == (100, 15)
        assert interval["external_hit_rate"] == 0.25, "and not the 84 % of its whole life"
        assert interval["local_hit_rate"] == 0.75
        assert interval["answers"] == 4

    def test_the_watch_adds_intervals_up(self) -> None:
        later = page(prompt=1500, out=200, asked=1200, found=1025, queries=2500, hits=1300)
        frame = last(
            *(reading(2 * n, service("consumer-0", one)) for n, one in enumerate((OLD, NEW, later)))
        )
        watch = consumer(frame)["watch"]
        assert (watch["prompt_tokens"], watch["external_queries"]) == (500, 200)
        assert watch["external_hit_rate"] == 125 / 200
        assert frame.watched_s == 4
        assert frame.seconds == 2

    def test_a_restart_counts_from_its_start(self) -> None:
        small = page(prompt=30, out=3, asked=20, found=5, queries=30, hits=0)
        frame = last(
            reading(0, service("consumer-0", OLD, pid=1)),
            reading(2, service("consumer-0", condition="exited", pid=0)),
            reading(4, service("consumer-0", small, pid=2)),
        )
        assert consumer(frame)["interval"]["prompt_tokens"] == 30
        assert consumer(frame)["watch"]["external_hits"] == 5

    def test_a_restart_that_already_counted_more_than_before_it(self) -> None:
        """No counter shrank, so that only its process tells."""
        frame = last(
            reading(0, service("consumer-0", OLD, pid=1)),
            reading(2, service("consumer-0", NEW, pid=2)),
        )
        assert consumer(frame)["interval"]["prompt_tokens"] == 1400
        same = last(
            reading(0, service("consumer-0", OLD, pid=1)),
            reading(2, service("consumer-0", NEW, pid=1)),
        )
        assert consumer(same)["interval"]["prompt_tokens"] == 400

    def test_after_silence_the_interval_is_longer(self) -> None:
        frame = last(
            reading(0, service("consumer-0", OLD)),
            reading(2, service("consumer-0", condition="not ready")),
            reading(4, service("consumer-0", NEW)),
        )
        assert consumer(frame)["interval"]["seconds"] == 4
        assert consumer(frame)["interval"]["prompt_tokens_s"] == 100

    def test_silence_is_not_zero(self) -> None:
        frame = last(reading(0, service("consumer-0", OLD)), reading(2, service("consumer-0")))
        assert consumer(frame)["interval"] is None
        assert consumer(frame)["load"] is None

    def test_an_engine_silent_from_the_beginning_starts_at_zero(self) -> None:
        silent = service("consumer-0", condition="not ready")
        frame = last(reading(0, silent), reading(2, service("consumer-0", OLD)))
        assert consumer(frame)["interval"] is None
        assert consumer(frame)["watch"]["prompt_tokens"] == 0

    def test_an_engine_started_during_the_watch_counts_from_its_start(self) -> None:
        frame = last(reading(0, up=False), reading(2, service("consumer-0", OLD)))
        assert consumer(frame)["watch"]["prompt_tokens"] == 1000

    def test_each_engine_has_its_own_clock(self) -> None:
        late = service("consumer-0", NEW, clock_s=4.0)
        frame = last(reading(0, service("consumer-0", OLD)), reading(2, late))
        assert consumer(frame)["interval"]["prompt_tokens_s"] == 100


class TestTotals:
    def test_the_stores_hits_are_the_consumers(self) -> None:
        asks_in_vain = page(asked=5000, found=0, queries=100, hits=20, answers=9)
        before = [service("producer-0", page(asked=0, found=0, queries=0, hits=0, answers=0))]
        frame = last(
            reading(0, *before, service("consumer-0", OLD)),
            reading(2, service("producer-0", asks_in_vain), service("consumer-0", NEW)),
        )
        for totals in (frame.counts, frame.watched):
            assert totals.cache.external_rate == 0.25
            assert totals.cache.local_rate == 320 / 500
            assert totals.answers == 4, "each request is also one of a producer's"

    def test_the_path_of_all_engines(self) -> None:
        frame = last(
            *(
                reading(
                    n,
                    service("producer-0", page(store_stored=3 * n)),
                    service("consumer-0", page(load_loaded=2 * n)),
                )
                for n in (0, 1)
            )
        )
        path = frame.counts.path
        assert path is not None
        assert (path.stored_chunks, path.loaded_chunks) == (3, 2)
        assert (
            last(
                reading(0, service("consumer-0", OLD)), reading(1, service("consumer-0", NEW))
            ).counts.path
            is None
        )


class TestTiers:
    """Where KV came from, where LMCache's server is between the engines and Redis."""

    def server(self, second: int, found_in_redis: float, **more: float) -> ServiceReading:
        samples = [Sample("lmcache_mp_lookup_hit_l2_tokens_total", {}, found_in_redis)]
        counted = page(**more).samples if more else ()
        made = service("kv-server", MetricsPage((*samples, *counted)), clock_s=1000.0 + second)
        return replace(made, role="kv-server")

    def test_tiers_are_summed_over_all_engines(self) -> None:
        producer = (page(queries=0, hits=0, asked=0, found=0),
                    page(queries=1000, hits=100, asked=900, found=200))  # fmt: skip
        frame = last(
            reading(0, self.server(0, 50), service("producer-0", producer[0]),
                    service("consumer-0", OLD)),
            reading(2, self.server(2, 70), service("producer-0", producer[1]),
                    service("consumer-0", NEW)),
        )  # fmt: skip
        # The consumer: 400 asked, 300 held, 25 loaded.
        assert frame.counts.tiers == Tiers(1400, local=400, server=205, redis=20, computed=775)
        assert frame.as_dict()["interval"]["tiers"]["redis"] == 20
        assert frame.watched.tiers == frame.counts.tiers

    def test_engines_of_other_hosts_have_another_server(self) -> None:
        busy = page(queries=9000, hits=0, asked=0, found=0)
        frame = last(
            reading(0, self.server(0, 0), service("consumer-0", OLD),
                    replace(service("producer-0", page(queries=0, hits=0)), remote=True)),
            reading(2, self.server(2, 20), service("consumer-0", NEW),
                    replace(service("producer-0", busy), remote=True)),
        )  # fmt: skip
        assert frame.counts.tiers == Tiers(400, local=300, server=5, redis=20, computed=75)
        assert frame.watched.tiers == frame.counts.tiers

    def test_pages_of_different_moments_give_no_negative_part(self) -> None:
        frame = last(
            reading(0, self.server(0, 0), service("consumer-0", OLD)),
            reading(2, self.server(2, 999), service("consumer-0", NEW)),
        )
        assert frame.counts.tiers == Tiers(400, local=300, server=0, redis=25, computed=75)

    def test_a_server_that_is_silent_or_absent_tells_none(self) -> None:
        silent = replace(service("kv-server"), role="kv-server")
        seen = last(
            reading(0, self.server(0, 0), service("consumer-0", OLD)),
            reading(2, silent, service("consumer-0", NEW)),
        )
        assert seen.counts.tiers is None
        without = last(
            reading(0, service("consumer-0", OLD)), reading(2, service("consumer-0", NEW))
        )
        never = last(reading(0, silent, service("consumer-0", OLD)), reading(2, silent))
        assert never.watched.tiers is None
        assert without.counts.tiers is None and without.as_dict()["watch"]["tiers"] is None

    def test_the_servers_path_to_redis_is_the_stacks(self) -> None:
        frame = last(
            reading(0, self.server(0, 0, store_stored=1), service("consumer-0", OLD)),
            reading(2, self.server(2, 0, store_stored=5), service("consumer-0", NEW)),
        )
        assert frame.counts.path is not None
        assert frame.counts.path.stored_chunks == 4


class TestStore:
    def test_traffic_is_a_rate(self) -> None:
        later = stats(
            received_bytes=14_000_000, sent_bytes=22_000_000, commands=300, evicted_keys=5
        )
        store = last(reading(0), reading(2, store=later)).as_dict()["redis"]
        assert store["interval"]["received_bytes_s"] == 2e6
        assert store["interval"]["sent_bytes_s"] == 1e6
        assert store["interval"]["commands_s"] == 100
        assert store["watch"]["evicted_keys"] == 5

    def test_a_restarted_redis_has_no_interval(self) -> None:
        """The new server has counted more than the old one had; that is no difference."""
        other = stats(run_id="b", received_bytes=90_000_000, evicted_keys=50)
        interval = last(reading(0), reading(2, store=other)).as_dict()["redis"]["interval"]
        assert interval["restarted"] is True
        assert interval["received_bytes_s"] is None
        assert interval["evicted_keys"] is None

    def test_unknown_counters_of_redis_have_no_rate(self) -> None:
        blind = stats(run_id=None, commands=None, received_bytes=None, sent_bytes=None)
        interval = last(reading(0, store=blind), reading(2, store=blind)).as_dict()["redis"][
            "interval"
        ]
        assert interval["commands_s"] is None
        assert interval["restarted"] is False

    def test_a_silent_redis_has_no_interval(self) -> None:
        frame = last(reading(0), reading(2, store=None), reading(4, store=stats(commands=500)))
        assert frame.as_dict()["redis"]["interval"]["commands_s"] == 100
        assert frames(reading(0), reading(2, store=None))[1].store is None


class TestRouter:
    def test_requests_and_errors_are_rates(self) -> None:
        frame = last(
            reading(0, service("router", page(health=2, requests=10))),
            reading(2, service("router", page(health=1, requests=16, errors=2))),
        )
        shown = frame.as_dict()["router"]
        assert shown["interval"] == {"seconds": 2, "requests_s": 3, "requests": 6, "errors": 2}
        assert shown["watch"] == {"requests": 6, "errors": 2}
        assert shown["engines"] == {"engines": 2, "healthy": 1}

    def test_a_router_without_metrics_has_no_frame(self) -> None:
        assert last(reading(0, service("router"))).router is None


class TestHealth:
    def sick(self, *conditions: str, **changes: object) -> Sequence[str]:
        made = [service(f"consumer-{n}", condition=c) for n, c in enumerate(conditions)]
        return last(reading(0, *made, **changes)).sick

    def test_services_that_ended_are_unhealthy(self) -> None:
        assert self.sick("ready") == []
        assert self.sick("ready", "exited") == ["consumer-1"]

    def test_a_silent_user_supplied_redis_is_unhealthy(self) -> None:
        assert self.sick("ready", user_redis=True, store=None) == ["the Redis of redis.url_file"]

    def test_a_stack_that_is_not_up_is_not_unhealthy(self) -> None:
        frame = last(reading(0, up=False, store=None))
        assert frame.sick == []
        assert frame.as_dict()["healthy"] is False


def test_a_failed_reading_is_reported_and_loses_nothing() -> None:
    trouble = reading(2, up=False, trouble="Docker does not answer")
    made = frames(
        reading(0, service("consumer-0", OLD)),
        trouble,
        reading(3, up=False, trouble="Docker does not answer"),
        reading(4, service("consumer-0", NEW)),
    )
    assert [event.kind for event in made[1].events] == ["trouble"]
    assert made[2].events == (), "said once"
    assert made[3].events == (), "it was not down, only not seen"
    assert consumer(made[3])["interval"]["prompt_tokens_s"] == 100


def test_a_frame_is_valid_json() -> None:
    made = frames(
        reading(0, service("consumer-0", OLD), service("router", page(health=2))),
        reading(2, service("consumer-0", NEW, pid=11), service("router", page(health=2))),
    )
    for frame in made:
        text = json.dumps(frame.as_dict(), allow_nan=False)
        assert json.loads(text)["at"].startswith("2026-03-01T12:00:0")
    assert pytest.approx(2) == made[1].seconds
