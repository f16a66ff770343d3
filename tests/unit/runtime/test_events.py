"""A stack's events: appended by several processes, read back, and bounded."""

from __future__ import annotations

import fcntl
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


def test_a_long_file_keeps_the_newest_events(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEPT", 5)
    monkeypatch.setattr(events, "_MAX_BYTES", 2_000)
    sizes = []
    for number in range(100):
        note_event(file, "consumer-0", "died", str(number))
        sizes.append(file.stat().st_size)
    assert max(sizes) < 2_000 + 200, "one event past the limit"
    assert [event.text for event in read_events(file)] == ["95", "96", "97", "98", "99"]


def test_events_written_by_others_are_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_BYTES", 0)  # each rewrites the file
    note_event(file, "router", "died", "before")
    by_another = file.read_text().replace("before", "another's")

    def lock(_: object, how: int) -> None:
        assert how == fcntl.LOCK_EX
        with file.open("a") as other:
            other.write(by_another)

    monkeypatch.setattr(fcntl, "flock", lock)
    note_event(file, "router", "back", "own")
    assert [event.text for event in read_events(file)] == ["before", "another's", "own"]
