"""Every fix of the connector on the pair's code, in each golden's engines."""

from __future__ import annotations

from typing import Any

from tests.conftest import REPO

Facts = dict[str, Any]
FIXES = {
    file.stem.split("_")[0]
    for file in (REPO / "deploy" / "connector" / "pdkit_connector" / "fixes").glob("b*.py")
}
SETTLED = {"applied", "not needed", "not applicable"}


def test_every_fix_settles(facts: Facts) -> None:
    assert {"compose/" + facts["vendor"] + "-1p1d consumer-0"} <= set(facts["fixes"])
    for engine, fixes in facts["fixes"].items():
        assert len(fixes) == len(FIXES), (engine, fixes)
        unsettled = {name: found for name, found in fixes.items() if found[0] not in SETTLED}
        assert not unsettled, engine


def test_loads_before_full_graphs_are_fixed(facts: Facts) -> None:
    for engine, fixes in facts["fixes"].items():
        assert fixes["B22"][0] == "applied", engine


def test_packed_kv_is_moved_whole(facts: Facts) -> None:
    """Newer vLLM packs K and V of a block, of which both releases of LMCache move one half."""
    for engine, fixes in facts["fixes"].items():
        assert fixes["B6"][0] == "applied", engine
