"""The full product of vendors, topologies and options, each built once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.workflows.prepare import Prepared
from deploy.workflows.render import rendered
from tests.unit.conftest import HOME
from tests.unit.stack.cases import all_cases


@dataclass(frozen=True)
class Case:
    """A stack of containers, and its Compose document."""

    name: str
    fields: Mapping[str, Any]
    prepared: Prepared
    document: dict[str, Any]

    @property
    def vendor(self) -> str:
        return str(self.fields["vendor"])

    @property
    def prepared_root(self) -> str:
        """The stack's folder, below which all its files lie."""
        return str(HOME.stack(self.prepared.stack.name).root)

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        return dict(self.document["services"])

    @property
    def engines(self) -> dict[str, dict[str, Any]]:
        return {
            name: service
            for name, service in self.services.items()
            if name.startswith(("producer-", "consumer-", "engine-"))
        }


@pytest.fixture(scope="session")
def contained(prepared: Callable[..., Prepared]) -> Callable[..., Case]:
    """Build a stack of containers from fields of its spec, on the hardware that it asks for."""

    def make(case: str = "", /, **fields: Any) -> Case:
        asked = {"vendor": "cuda", "runtime": "compose", "machine": None, **fields}
        made = prepared(**asked)
        return Case(case, asked, made, rendered(made, HOME))

    return make


@pytest.fixture(scope="session")
def cases(contained: Callable[..., Case]) -> list[Case]:
    return [contained(name, **fields) for name, fields in all_cases().items()]
