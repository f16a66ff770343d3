"""Secrets: made once, private, never shown."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from deploy.runtime.secrets import Secret, ensure_secrets, fill_in, read_secrets


def test_a_secret_does_not_show_itself() -> None:
    secret = Secret("hunter2")
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r:>20}", f"{[secret]}"]
    assert not [text for text in shown if "hunter2" in text]
    assert "hunter2" not in json.dumps({"secret": secret}, default=str)
    assert secret.reveal() == "hunter2"


def test_made_once_and_kept(tmp_path: Path) -> None:
    first = ensure_secrets(tmp_path, ("a", "b"))
    again = ensure_secrets(tmp_path, ("a", "b"))
    assert {name: secret.reveal() for name, secret in first.items()} == {
        name: secret.reveal() for name, secret in again.items()
    }


def test_secrets_are_unique_and_safe_in_urls(tmp_path: Path) -> None:
    values = [
        secret.reveal()
        for folder in ("one", "two")
        for secret in ensure_secrets(tmp_path / folder, ("a", "b")).values()
    ]
    assert len(set(values)) == 4
    assert all(len(value) >= 32 for value in values)
    assert all(value.replace("-", "").replace("_", "").isalnum() for value in values)


def test_only_the_owner_can_read_secrets(tmp_path: Path) -> None:
    ensure_secrets(tmp_path / "secrets", ("a",))
    assert stat.S_IMODE((tmp_path / "secrets" / "a").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700


def test_an_empty_file_is_not_a_secret(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("\n")
    assert read_secrets(tmp_path, ("a",)) == {}
    assert ensure_secrets(tmp_path, ("a",))["a"].reveal()


def test_reading_creates_no_secret(tmp_path: Path) -> None:
    ensure_secrets(tmp_path, ("a",))
    assert set(read_secrets(tmp_path, ("a", "b"))) == {"a"}
    assert not (tmp_path / "b").exists()


def test_a_secret_put_there_by_hand_counts(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine\n")
    assert ensure_secrets(tmp_path, ("a",))["a"].reveal() == "mine"


def test_placeholders_are_replaced_by_secrets() -> None:
    secrets = {"one": Secret("1"), "two": Secret(r"\g<0>")}
    filled = fill_in("a @{one} b @{two}@{one} @ {one} ${one}", secrets)
    assert filled == r"a 1 b \g<0>1 @ {one} ${one}"


def test_an_unknown_name_is_not_filled_in_silently() -> None:
    with pytest.raises(KeyError):
        fill_in("@{other}", {"one": Secret("1")})
