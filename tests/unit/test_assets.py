"""The data folders, found in a checkout. `test_wheel` finds them in a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.assets import asset, connector_path


@pytest.mark.parametrize(
    "parts", [("compose", "redis.conf"), ("lmcache_configs", "pdkit-producer.yaml"), ("scripts",)]
)
def test_an_asset_is_found(parts: tuple[str, ...], repo: Path) -> None:
    assert asset(*parts) == repo.joinpath(*parts)


def test_a_missing_asset_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="compose/none"):
        asset("compose", "none")


def test_the_path_of_the_connector_exists() -> None:
    assert (connector_path() / "pdkit_connector" / "__init__.py").is_file()
