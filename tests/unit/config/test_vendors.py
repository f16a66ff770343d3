"""The vendor table."""

from __future__ import annotations

import pytest

from deploy.config.vendors import VENDORS, vendor_named
from deploy.errors import ConfigError


def test_every_row_goes_by_its_name() -> None:
    assert all(vendor_named(name).name == name for name in VENDORS)


def test_an_unknown_vendor_gets_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'abacus' is not one of .*cpu") as caught:
        vendor_named("abacus")
    assert "--vendor cpu" in caught.value.hint


def test_the_cpu_vendor_needs_no_download() -> None:
    assert vendor_named("cpu").default_model == "tiny"
