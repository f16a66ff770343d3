"""Which connector shares a stack's KV, why, and what the other one would be."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.config.spec import SettledSpec
from deploy.errors import PdkitError
from deploy.planning.inventory import Inventory
from deploy.planning.kv_server import MP
from deploy.planning.plan import Plan, make_plan

HOW_TO = "docs/how-to/multiprocess-lmcache.md"
IN_ENGINES = "lmcache"
# The size that only the other connector has: a change of the connector leaves it out.
UNUSED_SIZE = {IN_ENGINES: "server_gib", MP: "staging_gib"}
_MEANS = {IN_ENGINES: "inside each engine", MP: "through LMCache's server"}


@dataclass(frozen=True)
class ConnectorChoice:
    """How engines share KV, and how else they could.

    Attributes:
        name: the connector.
        asked: the settings name it; else it is the default.
        other: the connector that was not chosen.
        refused: why the other one does not work with these settings; "" if it does.
    """

    name: str
    asked: bool
    other: str
    refused: str

    def __str__(self) -> str:
        chosen = f"{self.name}, {_MEANS[self.name]}"
        how = f"{chosen} ({'asked for' if self.asked else 'default'})"
        other = f"{self.other}, {_MEANS[self.other]},"
        if self.refused:
            return f"{how}; {self.other} would be refused: {self.refused}"
        if self.asked:
            return f"{how}; {other} is the default, which LMCache has deprecated"
        return f"{how}, which LMCache has deprecated; {other} works here too: {HOW_TO}"


def connector_choice(plan: Plan, inventory: Inventory) -> ConnectorChoice | None:
    """Return how a plan's engines share KV, and what its machine says to the other connector.

    None if they share none.
    """
    if not plan.shares_kv:
        return None
    name = plan.spec.connector
    other = IN_ENGINES if name == MP else MP
    return ConnectorChoice(name, name == MP, other, _refused(plan, inventory, other))


def _refused(plan: Plan, inventory: Inventory, connector: str) -> str:
    lmcache = plan.spec.lmcache.model_copy(update={UNUSED_SIZE[connector]: None})
    changes = {"connector": connector, "lmcache": lmcache}
    spec = SettledSpec(plan.spec.model_copy(update=changes))
    try:
        make_plan(spec, plan.model, inventory)
    except PdkitError as exc:
        return exc.message.removeprefix("--connector: ")
    return ""
