"""What an engine's metrics page says of its connector."""

from __future__ import annotations

from deploy.metrics.connector import (
    FIX,
    KV,
    REDIS_FAILED,
    ConnectorReport,
)
from deploy.metrics.page import MetricsPage
from deploy.verify.store_path import Sample


def failed(at: float, kind: str, said: str) -> Sample:
    return Sample(REDIS_FAILED, {"way": "storing", "kind": kind, "said": said}, at)


def test_the_newest_failure_of_a_kind_is_read() -> None:
    report = ConnectorReport.read(
        MetricsPage(
            (
                failed(3.0, "unreachable", "Error 111"),
                failed(1.0, "oom", "OOM command not allowed"),
                failed(2.0, "noperm", "no permissions"),
            )
        )
    )
    assert report.redis_said(["oom"]) == "storing failed: OOM command not allowed"
    assert report.redis_said(["oom", "noperm"]) == "storing failed: no permissions", "the newest"
    assert report.redis_said(["readonly"]) == report.redis_said([]) == ""


def test_the_newest_of_one_kind_counts() -> None:
    samples = (failed(9.0, "oom", "new"), failed(1.0, "oom", "old"), failed(5.0, "auth", "no"))
    assert ConnectorReport.read(MetricsPage(samples)).redis_said(["oom", "auth"]).endswith("new")


def test_fixes_and_kv_are_read_from_metrics() -> None:
    report = ConnectorReport.read(
        MetricsPage(
            (
                Sample("pdkit_connector_info", {"lmcache": "9", "tested": "no"}, 1.0),
                Sample(FIX, {"fix": "B1", "state": "not needed", "evidence": "seen"}, 1.0),
                Sample(KV, {"facts": '{"chunk_size": 64}'}, 1.0),
            )
        )
    )
    assert (report.lmcache, report.tested) == ("9", False)
    assert (report.fixes, report.evidence) == ({"B1": "not needed"}, {"B1": "seen"})
    assert report.kv == {"chunk_size": 64}


def test_a_page_without_a_connector_reports_nothing() -> None:
    assert ConnectorReport.read(MetricsPage()) == ConnectorReport()


def test_invalid_reports_of_the_connector_are_left_out() -> None:
    """Whoever serves the page, `status` must not end."""
    samples = (
        Sample("pdkit_fix_info", {"fix": "B1"}, 1.0),
        Sample("pdkit_fix_info", {"state": "active"}, 1.0),
        Sample("pdkit_fix_info", {"fix": "B2", "state": "active"}, 1.0),
        Sample("pdkit_kv_info", {}, 1.0),
        Sample("pdkit_kv_info", {"facts": "[" * 100_000}, 1.0),
        Sample("pdkit_store_last_failure_timestamp_seconds", {"kind": "error"}, 1.0),
    )
    report = ConnectorReport.read(MetricsPage(samples))
    assert report == ConnectorReport(fixes={"B2": "active"}, evidence={"B2": ""})
    for facts in ("[1]", "5", "{", '"x"'):
        assert not ConnectorReport.read(
            MetricsPage((Sample("pdkit_kv_info", {"facts": facts}, 1.0),))
        ).kv
