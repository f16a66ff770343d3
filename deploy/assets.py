"""The data folders of the project: inside the package in a wheel, at the top in a checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import __version__

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Kit:
    """What stacks are given of pdkit itself.

    Attributes:
        connector, router: folders to put on the PYTHONPATH of engines and of the router.
        monitoring: the folder with the rules of Prometheus and the dashboards of Grafana.
    """

    connector: Path
    router: Path
    monitoring: Path
    version: str = __version__


def asset(*parts: str) -> Path:
    """Return the path of a shipped file or folder, such as `asset("lmcache_configs", "a.yaml")`.

    Raises:
        FileNotFoundError: nothing of that name is shipped; a fault of the build, not of the user.
    """
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError("/".join(parts))


def yaml_asset(*parts: str) -> Any:
    """Return the content of a shipped YAML file."""
    import yaml

    text = asset(*parts).read_text(encoding="utf-8")
    return yaml.load(text, Loader=yaml_loader())  # noqa: S506 - a safe one


def yaml_loader() -> Any:
    """Return a safe loader: libyaml's, if available, which is ten times as fast."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def router_path() -> Path:
    """Return the folder to put on the router's PYTHONPATH so that `pdkit_router` imports."""
    return _PACKAGE / "router"


def monitoring_path() -> Path:
    """Return the folder with the rules of Prometheus and the dashboards of Grafana."""
    return asset("compose", "monitoring")


def connector_path() -> Path:
    """Return the folder to put on an engine's PYTHONPATH so that `pdkit_connector` imports."""
    return _PACKAGE / "connector"
