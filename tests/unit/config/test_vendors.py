"""The vendor table."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from deploy.config.spec import VendorChoice
from deploy.config.vendors import VENDORS, vendor_named
from deploy.errors import ConfigError


def test_every_row_goes_by_its_name() -> None:
    assert all(vendor_named(name).name == name for name in VENDORS)


def test_every_vendor_can_be_chosen() -> None:
    assert set(get_args(VendorChoice)) == {"auto", *VENDORS}


def test_an_unknown_vendor_gets_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'abacus' is not one of .*cpu") as caught:
        vendor_named("abacus")
    assert "--vendor cpu" in caught.value.hint


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_the_reference_says_what_engines_are_pinned_to(vendor: str, repo: Path) -> None:
    page = (repo / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    listed = [line for line in page.splitlines() if line.startswith("| ") and "`engine:" in line]
    assert listed == [
        f"| {pin.what} | {pin.reason} | `{pin.lift}` |" for pin in vendor_named(vendor).pins
    ]


def test_the_cpu_vendor_needs_no_download() -> None:
    assert vendor_named("cpu").default_model == "tiny"
