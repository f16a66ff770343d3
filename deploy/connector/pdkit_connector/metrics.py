"""What an engine counts and reports, on the metrics page of vLLM's API server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from pdkit_connector import engine_report, store_barrier
from pdkit_connector.counters import COUNTERS, HELP, PREFIX, LabelledCount, parse
from pdkit_connector.redis_path import info
from pdkit_connector.worker_socket import Answer, ask_now, engine_name, serve, workers

QUESTION = "counters"
SILENT = "pdkit_silent_workers"
_LIMIT_S = 0.5


async def answer() -> bytes:
    """Return a worker's answer to QUESTION."""
    return COUNTERS.dump()


class EngineCollector:
    """Collects the counts and reports of an engine's workers, and this process' own counts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: dict[tuple[str, int], bytes] = {}  # question, worker → its last answer

    def describe(self) -> list[Any]:
        """Return nothing: the workers are not there yet when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Return the counts as Prometheus' counters, summed over the workers, and the report."""
        there = list(range(workers()))
        counts, silent = self._last_answers(QUESTION, there)
        yield from _counters([*COUNTERS.all(), *chain.from_iterable(map(parse, counts))])
        reports, _ = self._last_answers(engine_report.QUESTION, there)
        yield from engine_report.families(reports)
        # One worker speaks for all, which have the same Redis.
        _, redis = next(self._ask(info.QUESTION, there), (0, b"{}"))
        yield from info.families(redis)
        yield _silent(silent)

    def _last_answers(self, question: str, there: list[int]) -> tuple[list[bytes], int]:
        """Return each worker's last answer, and how many workers gave none now.

        A sum without a worker that is late would look like a restart, and the next one like new.
        """
        answers = dict(self._ask(question, there))
        self._last |= {(question, worker): reply for worker, reply in answers.items()}
        every = range(workers())
        last = [reply for worker in every if (reply := self._last.get((question, worker)))]
        return last, len(every) - len(answers)

    def _ask(self, question: str, there: list[int]) -> Iterator[tuple[int, bytes]]:
        """Yield workers and what they answer; take those that are silent off the list.

        The API server answers nobody while it waits, not even those who ask for its health: a
        worker that hangs may cost it one wait, not one for each question.
        """
        for worker in tuple(there):
            reply = ask_now(self._name, worker, question, _LIMIT_S)
            if reply is None:
                there.remove(worker)
            elif reply:
                yield worker, reply


class ServerCollector:
    """Collects what LMCache's server counts of its second tier, in this process."""

    def describe(self) -> list[Any]:
        """Return nothing, so that nothing is collected before there is something."""
        return []

    def collect(self) -> Iterator[Any]:
        """Return the counts as Prometheus' counters, and the readings of Redis."""
        yield from _counters(COUNTERS.all())
        yield from info.families(info.SERVERS.dump())


def _silent(silent: int) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    text = "Workers that did not report now: the page has what they last reported."
    return GaugeMetricFamily(SILENT, text, value=silent)


def _counters(counts: Iterable[LabelledCount]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    sums: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for name, labels, count in counts:
        of_name = sums.setdefault(name, {})
        key = tuple(sorted(labels.items()))
        of_name[key] = of_name.get(key, 0) + count
    for name in sorted(sums):
        names = sorted({label for key in sums[name] for label, _ in key})
        family = CounterMetricFamily(PREFIX + name, HELP.get(name, ""), labels=names)
        for key, count in sorted(sums[name].items()):
            of_label = dict(key)
            family.add_metric([of_label.get(label, "") for label in names], count)
        yield family


def open_socket(worker: int, stored: Answer | None = None) -> None:
    """Answer from now on, where the kit asked for it.

    Args:
        stored: the answer of the store barrier; None for the stores that were noted with it.
    """
    if name := engine_name():
        answers = {
            store_barrier.QUESTION: stored or store_barrier.answer(),
            QUESTION: answer,
            engine_report.QUESTION: engine_report.answer,
            info.QUESTION: info.answer,
        }
        serve(name, worker, answers)
