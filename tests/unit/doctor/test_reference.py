"""docs/reference/doctor.md says what the rules say."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.doctor.rules import BEGIN, END, RULES, reference


def test_reference_is_current(repo: Path) -> None:
    file = repo / "docs" / "reference" / "doctor.md"
    text = file.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"
    if os.environ.get("UPDATE_GOLDENS"):
        file.write_text(wanted, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == wanted, "if this is meant: UPDATE_GOLDENS=1"


def test_every_rule_is_in_it() -> None:
    told = reference()
    assert all(f"| `{rule.id}` |" in told for rule in RULES)
