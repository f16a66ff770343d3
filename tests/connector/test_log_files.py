"""The logs of a stack of processes, which its engines keep within bounds."""

from __future__ import annotations

import logging
import logging.config
import threading
from pathlib import Path

import pytest
from pdkit_connector import log as module
from pdkit_connector.log import bound_logs, free_oldest, leave_out_polls

MIB = 2**20
LINE = b"x" * 1023 + b"\n"


def used(log: Path) -> int:
    return log.stat().st_blocks * 512


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "engine.log"
    log.write_bytes(LINE * 4096)
    return log


def test_the_oldest_part_of_a_large_log_is_freed(log: Path) -> None:
    free_oldest(log, 2 * MIB, MIB)
    assert used(log) <= MIB + 4096
    assert log.stat().st_size == 4 * MIB, "offsets stay valid"
    assert log.read_bytes()[3 * MIB :] == LINE * 1024


def test_a_writer_goes_on_where_it_was(log: Path) -> None:
    with log.open("ab") as writer:
        writer.write(b"before\n")
        writer.flush()
        free_oldest(log, 2 * MIB, MIB)
        writer.write(b"after\n")
    assert log.read_bytes().endswith(b"x\nbefore\nafter\n")


@pytest.mark.parametrize(("limit", "kept"), [(8 * MIB, MIB), (MIB, 8 * MIB)])
def test_a_small_log_is_not_changed(log: Path, limit: int, kept: int) -> None:
    free_oldest(log, limit, kept)
    assert used(log) >= 4 * MIB


def test_freed_bytes_do_not_count_as_used(log: Path) -> None:
    free_oldest(log, 2 * MIB, MIB)
    with log.open("ab") as writer:
        writer.write(LINE)
    free_oldest(log, 2 * MIB, 1024)
    assert used(log) > 4096, "it takes less than the limit"


def test_all_logs_of_the_stack_are_watched(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    twice = threading.Event()

    def note(path: Path) -> None:
        seen.append(path.name)
        if seen.count("engine.log") == 2:
            twice.set()

    (log.parent / "notes.txt").touch()
    monkeypatch.setattr(module, "free_oldest", note)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    bound_logs({"PDKIT_STACK_HOME": str(log.parents[1])})
    assert twice.wait(10)
    monkeypatch.setattr(module, "_LOOK_S", 3600.0)
    assert set(seen) == {"engine.log"}


def test_no_log_is_watched_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", None)
    bound_logs({})


def test_a_file_system_without_hole_punching_is_named(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module, "free_oldest", refuse)
    monkeypatch.setattr(module, "get_logger", logging.getLogger)
    module._watch(log.parent)
    assert "grow without limit: [Errno 95] Operation not supported" in caplog.text


def test_a_log_has_no_polls_that_succeed(caplog: pytest.LogCaptureFixture) -> None:
    """Else a warning is gone from the log's last lines within seconds."""
    access = logging.getLogger("uvicorn.access")
    before = list(access.filters)
    leave_out_polls()
    # As vLLM does later.
    logging.config.dictConfig({
        "version": 1, "disable_existing_loggers": False,
        "loggers": {"uvicorn.access": {"level": "INFO", "propagate": True}},
    })  # fmt: skip
    try:
        for method, path, status in (
            ("GET", "/health", 200), ("GET", "/metrics?name=x", 200), ("GET", "/health", 503),
            ("GET", "/healthy", 200), ("POST", "/health", 200), ("POST", "/v1/completions", 200),
        ):  # fmt: skip
            access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", method, path, "1.1", status)
        access.info("another line")
    finally:
        access.filters[:] = before
    assert [record.getMessage().partition(" - ")[2] or record.msg for record in caplog.records] == [
        '"GET /health HTTP/1.1" 503', '"GET /healthy HTTP/1.1" 200',
        '"POST /health HTTP/1.1" 200', '"POST /v1/completions HTTP/1.1" 200', "another line",
    ]  # fmt: skip
