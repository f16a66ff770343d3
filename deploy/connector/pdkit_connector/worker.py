"""What one worker of an engine answers to its API server."""

from __future__ import annotations

from pdkit_connector import engine_report, metrics, store_barrier
from pdkit_connector.redis_path import info
from pdkit_connector.worker_socket import Answer, engine_name, serve


def open_socket(worker: int, stored: Answer | None = None) -> None:
    """Answer from now on, where the kit asked for it.

    Args:
        stored: the answer of the store barrier; None for the stores that were noted with it.
    """
    if name := engine_name():
        answers = {
            store_barrier.QUESTION: stored or store_barrier.answer(),
            metrics.QUESTION: metrics.answer,
            engine_report.QUESTION: engine_report.answer,
            info.QUESTION: info.answer,
        }
        serve(name, worker, answers)
