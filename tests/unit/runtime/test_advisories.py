"""Which advisories hold for which versions, and where they are read from."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import ConfigError
from deploy.runtime import advisories
from deploy.runtime.advisories import Advisory, advisories_of, read_advisories


def record(*events: dict[str, str], name: str = "Some.Package", **more: Any) -> dict[str, Any]:
    """Return a record in OSV's form, of one range."""
    affected = {
        "package": {"ecosystem": "PyPI", "name": name},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
    }
    return {"id": "GHSA-1", "affected": [affected], **more}


FIXED = record({"introduced": "0"}, {"fixed": "1.10"})
AGAIN = record({"introduced": "1.2"}, {"fixed": "1.4"}, {"introduced": "2.0"}, {"fixed": "2.1"})
LAST = record({"introduced": "1.0"}, {"last_affected": "1.5"})
OPEN = record({"introduced": "1.0rc1"})


@pytest.mark.parametrize(
    ("known", "version", "fixed"),
    [
        (FIXED, "1.9", "1.10"),
        (FIXED, "1.9+cpu", "1.10"),
        (FIXED, "1.10rc1", "1.10"),
        (FIXED, "1.10", None),
        (AGAIN, "1.1", None),
        (AGAIN, "1.3", "1.4"),
        (AGAIN, "1.9", None),
        (AGAIN, "2.0", "2.1"),
        (LAST, "1.5", ""),
        (LAST, "1.6", None),
        (OPEN, "1.0", ""),
        (OPEN, "0.9", None),
        (OPEN, "nightly_main_20260112", None),
    ],
)
def test_versions_in_a_range(known: dict[str, Any], version: str, fixed: str | None) -> None:
    found = advisories_of({"some_package": version}, [known])
    expected = () if fixed is None else (Advisory("GHSA-1", "some-package", version, fixed),)
    assert found == expected


def test_versions_in_a_list() -> None:
    known = record()
    known["affected"][0]["versions"] = ["1.0"]
    assert [one.id for one in advisories_of({"some-package": "1.0"}, [known])] == ["GHSA-1"]
    assert [one.id for one in advisories_of({"some-package": "1.0+cpu"}, [known])] == ["GHSA-1"]
    assert advisories_of({"some-package": "1.1"}, [known]) == ()


def test_a_range_that_cannot_be_compared_hides_neither_list_nor_other_ranges() -> None:
    known = record({"introduced": "0"}, {"fixed": "1.1-hotfix.x"})
    known["affected"][0]["versions"] = ["1.0"]
    assert [one.fixed for one in advisories_of({"some-package": "1.0"}, [known])] == [""]
    known["affected"][0]["ranges"] += FIXED["affected"][0]["ranges"]
    assert [one.fixed for one in advisories_of({"some-package": "1.9"}, [known])] == ["1.10"]


@pytest.mark.parametrize(
    "affected",
    ["x", ["x"], [{"ranges": [{"type": "ECOSYSTEM"}]}]],
)
def test_a_record_of_other_types_is_refused(tmp_path: Path, affected: object) -> None:
    file = tmp_path / "one.json"
    package = {"package": {"ecosystem": "PyPI", "name": "torch"}}
    if isinstance(affected, list):
        affected = [one if isinstance(one, str) else package | one for one in affected]
    file.write_text(json.dumps({"id": "X", "affected": affected}))
    with pytest.raises(ConfigError, match="is not a record"):
        read_advisories(file)


def test_commits_and_other_ecosystems_are_not_versions_of_pypi() -> None:
    commits = record({"introduced": "0"})
    commits["affected"][0]["ranges"][0]["type"] = "GIT"
    npm = record({"introduced": "0"})
    npm["affected"][0]["package"]["ecosystem"] = "npm"
    assert advisories_of({"some-package": "1.0"}, [commits, npm, {"id": "X"}]) == ()


def test_a_file_a_folder_and_a_zip_hold_records(tmp_path: Path) -> None:
    withdrawn = record(id="GHSA-2", withdrawn="2026-01-01T00:00:00Z")
    folder = tmp_path / "folder" / "PyPI"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(FIXED))
    (folder / "b.json").write_text(json.dumps(withdrawn))
    (folder / "README").write_text("not a record")
    (tmp_path / "list.json").write_text(json.dumps([FIXED, withdrawn]))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as packed:
        packed.write(folder / "a.json", "a.json")
        packed.write(folder / "README", "README")
    for path in (folder.parent, tmp_path / "list.json", tmp_path / "all.zip", folder / "a.json"):
        assert read_advisories(path) == [FIXED]


@pytest.mark.parametrize("text", ["", "{", "5", "[[]]", "{}", '{"id": 1}', "\ud800"])
def test_invalid_records_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text, errors="surrogatepass")
    with pytest.raises(ConfigError, match="--advisories"):
        read_advisories(file)
    with pytest.raises(ConfigError, match="--advisories"):
        read_advisories(tmp_path / "none")


def _zip(path: Path, text: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.json", text)
    return path


def _patched(path: Path, *, local: int, central: int, value: int) -> Path:
    """Change a field of a zip's only file, in both of its places."""
    data = bytearray(path.read_bytes())
    data[local] = value
    data[data.index(b"PK\x01\x02") + central] = value
    path.write_bytes(data)
    return path


def test_a_zip_that_cannot_be_unpacked_is_refused(tmp_path: Path) -> None:
    whole = _zip(tmp_path / "a.zip", json.dumps(FIXED).encode())
    with_password = _patched(_zip(tmp_path / "b.zip", b"{}"), local=6, central=8, value=1)
    by_other_means = _patched(_zip(tmp_path / "c.zip", b"{}"), local=8, central=10, value=99)
    assert read_advisories(whole) == [FIXED]
    for path in (with_password, by_other_means):
        with pytest.raises(ConfigError, match="--advisories"):
            read_advisories(path)


def test_levels_without_end_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="--advisories"):
        read_advisories(file)


def test_the_size_of_an_unpacked_zip_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes of a zip may stand for any number."""
    bomb = _zip(tmp_path / "bomb.zip", b" " * 1_000_000 + json.dumps(FIXED).encode())
    assert read_advisories(bomb) == [FIXED]
    monkeypatch.setattr(advisories, "_MOST_BYTES", 900_000)
    with pytest.raises(ConfigError, match="--advisories"):
        read_advisories(bomb)
