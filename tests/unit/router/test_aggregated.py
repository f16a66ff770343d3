"""Engines that do both phases: one request each, and with prefixes followed where its KV is."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pdkit_router.route import PrefixGroup
from pdkit_router.upstream import Engine

from tests.unit.router.conftest import ROUTER, Router, Start, engines_up

COMPLETIONS = "/v1/completions"


class TestPrefixes:
    @pytest.fixture
    def three(self) -> list[Engine]:
        return engines_up(3)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("a" * 600, "a" * 600 + "b" * 600),
            (list(range(300)), list(range(900))),
            (
                [{"role": "user", "content": "x" * 600}],
                [
                    {"role": "user", "content": "x" * 600},
                    {"role": "assistant", "content": "y"},
                    {"role": "user", "content": "z" * 600},
                ],
            ),
        ],
        ids=["text", "token ids", "messages"],
    )
    def test_a_longer_prompt_goes_to_the_engine_of_its_beginning(
        self, three: list[Engine], first: Any, second: Any
    ) -> None:
        group = PrefixGroup(three)
        served = group.choose((), group.beginning(first))
        assert {group.choose((), group.beginning(second)) for _ in range(6)} == {served}
        assert {group.choose((), group.beginning(f"{n}" * 600)) for n in range(6)} == set(three), (
            "others spread"
        )

    def test_the_longest_common_beginning_decides(self, three: list[Engine]) -> None:
        group, shared = PrefixGroup(three), "s" * 512
        one = group.choose((), group.beginning(shared + "1" * 512))
        two = group.choose({one}, group.beginning(shared + "2" * 512))
        assert two is not one
        assert group.choose((), group.beginning(shared + "1" * 1024)) is one
        assert group.choose((), group.beginning(shared + "2" * 1024)) is two

    def test_short_prompts_are_not_remembered(self, three: list[Engine]) -> None:
        group = PrefixGroup(three)
        assert {group.choose((), group.beginning("hello")) for _ in range(3)} == set(three)

    @pytest.mark.parametrize("prompt", [None, 3, {"a": 1}, [], "\ud800" * 600])
    def test_any_request_of_a_client_finds_an_engine(
        self, three: list[Engine], prompt: Any
    ) -> None:
        group = PrefixGroup(three)
        assert group.choose((), group.beginning(prompt)) in three

    def test_a_prefix_does_not_wait_for_a_busy_or_lost_engine(self, three: list[Engine]) -> None:
        group, prompt = PrefixGroup(three), "p" * 600
        served = group.choose((), group.beginning(prompt))
        assert served is not None
        served.busy = 9
        other = group.choose((), group.beginning(prompt))
        assert other is not served
        served.busy = 0
        assert group.choose((), group.beginning(prompt)) is other, "its KV is there now"
        assert other is not None
        other.state = "down"
        assert group.choose((), group.beginning(prompt)) not in (other, None)
        assert group.choose(three, group.beginning(prompt)) is None

    def test_the_number_of_remembered_prefixes_is_limited(
        self, three: list[Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pdkit_router.route._KNOWN", 4)
        group = PrefixGroup(three)
        for n in range(9):
            group.choose((), group.beginning(f"{n}" * 600))
        assert len(group._served) == 4


@pytest.fixture(scope="module")
def aggregated(start_router: Start) -> Router:
    return start_router("--follow-prefixes", names=("engine-0", "engine-1", "engine-2"))


def test_each_request_meets_one_engine(aggregated: Router) -> None:
    front, engines = aggregated.client, aggregated.engines
    assert front.get("/readiness").json()["status"] == "ready"
    for engine in engines:
        engine.reset()
    body = {"model": "m", "prompt": "c" * 600, "max_tokens": 5}
    answers = [front.post(COMPLETIONS, json=body, headers={"x-pdkit-trace": "1"}) for _ in range(3)]
    (by,) = {answer.json()["by"] for answer in answers}
    assert answers[0].headers["x-pdkit-trace"] == f"producer=-; consumer={by}; tries=1; cached=7"
    seen = [one for engine in engines for one in engine.seen if one.method == "POST"]
    assert [one.json["max_tokens"] for one in seen] == [5, 5, 5], "nobody was asked for a prefill"
    page = aggregated.metrics()
    assert 'pdkit_router_engine_healthy{engine="engine-2",role="aggregated"} 1' in page
    assert "pdkit_router_degraded_total 0" in page


@pytest.mark.parametrize(
    "named",
    [
        (),
        ("--producer", "p=h:1"),
        ("--producer", "p=h:1", "--consumer", "c=h:2", "--engine", "e=h:3"),
    ],
)
def test_invalid_roles_are_refused(named: tuple[str, ...]) -> None:
    doors = ("--host", "h", "--port", "1", "--metrics-host", "h", "--metrics-port", "2")
    done = subprocess.run(
        (sys.executable, "-m", "pdkit_router", *doors, *named),
        env={"PYTHONPATH": ROUTER}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "either --producer and --consumer, or --engine" in done.stderr
