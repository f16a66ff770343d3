"""Two routers in turns: each is charged for what it did, whatever the machine does meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace

import pytest

from bench.before_after import table
from bench.kit import cpu_s
from bench.router import turns
from bench.router.slower import slower

PIDS = {"after": 1, "before": 2}
ROUTERS = {name: (pid, pid) for name, pid in PIDS.items()}


class Machine:
    """Routers whose requests take processor time; it may become slower with each request."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float], slows: float = 0.0
    ) -> None:
        self.costs = {PIDS[name]: cost for name, cost in costs.items()}
        self.slows = slows
        self.ran_s = dict.fromkeys(self.costs, 0.0)
        self.asked: list[int] = []
        monkeypatch.setattr(turns, "connected", self._connected)
        monkeypatch.setattr(turns, "cpu_s", lambda pid: self.ran_s[pid])
        now = SimpleNamespace(perf_counter=lambda: sum(self.ran_s.values()))
        monkeypatch.setattr(turns, "time", now)

    async def _connected(self, port: int, clients: int, **_: bool) -> list[SimpleNamespace]:
        async def ask() -> None:
            self.asked.append(port)
            self.ran_s[port] += self.costs[port] * (1 + self.slows * len(self.asked))

        return [SimpleNamespace(ask=ask, close=lambda: None) for _ in range(clients)]


def test_routers_take_turns_and_each_comes_first_equally_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, {"after": 1.0, "before": 1.0})
    turns.in_turns(ROUTERS, 2, 4, stream=True)
    assert machine.asked == [2, 2, 1, 1, 1, 1, 2, 2] * 2


def test_each_is_charged_for_its_own_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"after": 2.0, "before": 3.0})
    noted = turns.in_turns(ROUTERS, 1, 3, stream=False)
    assert {name: of.spent_s for name, of in noted.items()} == {
        "after": 6.0,
        "before": 9.0,
    }
    assert {name: of.took_s for name, of in noted.items()} == {
        "after": [2.0] * 3,
        "before": [3.0] * 3,
    }
    assert sum(machine.ran_s.values()) == 15


@pytest.mark.parametrize(("cost", "said"), [(1.0, "yes"), (1.05, "NO"), (0.95, "yes")])
def test_a_known_cost_is_measured_on_a_machine_that_slows_down(
    monkeypatch: pytest.MonkeyPatch, cost: float, said: str
) -> None:
    Machine(monkeypatch, {"after": cost, "before": 1.0}, slows=0.1)
    rounds = [turns.in_turns(ROUTERS, 1, 40, stream=False) for _ in range(20)]
    spent = {name: [one[name].spent_s for one in rounds] for name in PIDS}
    *_, row = table({"router": spent}).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[-1] == said
    assert float(cells[2]) == pytest.approx(cost)


def test_the_processor_time_is_of_the_process() -> None:
    before = time.process_time()
    assert before <= cpu_s(os.getpid()) <= time.process_time()


def test_the_slower_router_keeps_the_processor_busy_and_serves() -> None:
    served: list[tuple[str, ...]] = []

    async def serve(*given: str) -> None:
        served.append(given)

    began = time.thread_time()
    asyncio.run(slower(serve, 20_000)("door", "request", "answer"))
    assert time.thread_time() - began >= 0.02
    assert served == [("door", "request", "answer")]
