"""A stack's events: appended by several processes, read back, and bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.runtime import events
from deploy.runtime.events import note_event, read_events


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_read_back_in_order(file: Path) -> None:
    assert read_events(file) == []
    for text in ("one", "two"):
        note_event(file, "producer-0", "died", text)
    assert [(event.service, event.kind, event.text) for event in read_events(file)] == [
        ("producer-0", "died", "one"), ("producer-0", "died", "two"),
    ]  # fmt: skip
    assert file.stat().st_mode & 0o077 == 0


def test_a_broken_line_is_skipped(file: Path) -> None:
    note_event(file, "router", "back", "good")
    with file.open("a") as stream:
        stream.write('{"at": "now"}\n{"at"\n')
    note_event(file, "router", "back", "better")
    assert [event.text for event in read_events(file)] == ["good", "better"]


def test_only_the_newest_stay_in_a_long_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEPT", 5)
    monkeypatch.setattr(events, "_MAX_BYTES", 2_000)
    sizes = []
    for number in range(100):
        note_event(file, "consumer-0", "died", str(number))
        sizes.append(file.stat().st_size)
    assert max(sizes) < 2_000 + 200, "one event past the limit"
    assert [event.text for event in read_events(file)] == ["95", "96", "97", "98", "99"]


def test_writers_that_rewrite_lose_nothing_of_each_other(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_KEPT", 1_000)
    monkeypatch.setattr(events, "_MAX_BYTES", 0)  # each rewrites the file
    with ThreadPoolExecutor(8) as pool:
        for number in range(200):
            pool.submit(note_event, file, "router", "back", str(number))
    assert len(file.read_text().splitlines()) == 200
    assert {int(event.text) for event in read_events(file)} == set(range(200))
