"""A metrics page is read again while it lacks what a worker counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deploy.metrics.connector import CONNECTOR, SILENT_WORKERS
from deploy.metrics.page import MetricsPage
from deploy.runtime import whole_page as module
from deploy.runtime.whole_page import whole_page
from deploy.verify.store_path import Sample

WHOLE = MetricsPage((Sample(SILENT_WORKERS, {}, 0),))
ONE_SILENT = MetricsPage(
    (Sample(CONNECTOR, {"lmcache": "0.5.6"}, 1), Sample(SILENT_WORKERS, {}, 1))
)
# Of an engine without the connector.
UNREPORTED = MetricsPage((Sample("vllm:num_requests_running", {}, 0),))


def reader(*pages: MetricsPage) -> tuple[Callable[[], MetricsPage], list[MetricsPage]]:
    """Return what reads these pages one after the other, and those that are left."""
    left = list(pages)
    return lambda: left.pop(0), left


def test_a_page_is_read_again_until_all_workers_are_on_it() -> None:
    read, left = reader(ONE_SILENT, ONE_SILENT, WHOLE, ONE_SILENT)
    assert whole_page(read) == WHOLE
    assert left == [ONE_SILENT]


@pytest.mark.parametrize("page", [WHOLE, UNREPORTED])
def test_other_pages_are_read_once(page: MetricsPage) -> None:
    read, left = reader(page, ONE_SILENT)
    assert whole_page(read) == page
    assert left == [ONE_SILENT]


@pytest.mark.parametrize("limits", [{"_READS": 3}, {"_WAIT_S": 0.3, "_READS": 1000}])
def test_a_worker_that_hangs_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, float]
) -> None:
    for name, value in ({"_PAUSE_S": 0.01} | limits).items():
        monkeypatch.setattr(module, name, value)
    read, left = reader(*[ONE_SILENT] * 1000)
    assert whole_page(read) == ONE_SILENT
    assert 0 < len(left) < 999
    assert len(left) == 997 or "_WAIT_S" in limits
