"""Which connector shares a stack's KV, why, and what the other one would be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deploy.config.compat import image_for, judge, require_compatible
from deploy.config.fields import IN_ENGINES, MP
from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import SettledSpec
from deploy.errors import PdkitError
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan, make_plan

HOW_TO = "docs/how-to/multiprocess-lmcache.md"
# The size that only the other connector has: a change of the connector leaves it out.
UNUSED_SIZE: Mapping[str, str] = {IN_ENGINES: "server_gib", MP: "staging_gib"}
_WHERE: Mapping[str, str] = {IN_ENGINES: "inside each engine", MP: "through LMCache's server"}


@dataclass(frozen=True)
class ConnectorChoice:
    """How engines share KV, and how else they could.

    Attributes:
        name: the connector.
        asked: the settings name it; else it is the default for the versions.
        other: the connector that was not chosen.
        refused: why the other one does not work with these settings; "" if it does.
    """

    name: str
    asked: bool
    other: str
    refused: str

    def __str__(self) -> str:
        how = chosen_connector(self.name, asked=self.asked)
        other = f"{self.other}, {_WHERE[self.other]},"
        if self.refused:
            return f"{how}; {self.other} would be refused: {self.refused}"
        if self.name == MP:
            return f"{how}; {other} works here too, and LMCache has deprecated it"
        return f"{how}, which LMCache has deprecated; {other} works here too: {HOW_TO}"


def chosen_connector(name: str, *, asked: bool) -> str:
    """Return in words which connector engines share KV by, and why."""
    only = f": {IN_ENGINES} does not work with these versions" if name == MP else ""
    return f"{name}, {_WHERE[name]} ({'asked for' if asked else f'default{only}'})"


def connector_choice(
    plan: Plan,
    inventory: Inventory,
    *,
    asked: bool,
    versions: tuple[str | None, str | None] = (None, None),
) -> ConnectorChoice | None:
    """Choose the connector of a plan, and say why the other one would be refused.

    None if they share none. `versions` are those of vLLM and LMCache, if known.
    """
    if not plan.shares_kv:
        return None
    name = plan.connector
    other = IN_ENGINES if name == MP else MP
    refused = _refused(plan, inventory, other) or _bad_pair(plan, versions, other)
    return ConnectorChoice(name, asked, other, refused)


def _bad_pair(plan: Plan, versions: tuple[str | None, str | None], connector: str) -> str:
    """Return why the engines' versions do not work with a connector; "" if they do."""
    if RUNTIMES[plan.runtime].own_images and not plan.spec.image:
        image = image_for(plan.vendor.name, connector)
        versions = (image.vllm, image.lmcache)
    if None in versions:
        return ""
    try:
        verdict = judge(plan.vendor.name, *versions, connector=connector)
        require_compatible(verdict, allow_untested=plan.spec.allow_untested)
    except PdkitError as exc:
        return exc.message
    return ""


def _refused(plan: Plan, inventory: Inventory, connector: str) -> str:
    lmcache = plan.spec.lmcache.model_copy(update={UNUSED_SIZE[connector]: None})
    changes = {"connector": connector, "lmcache": lmcache}
    spec = SettledSpec(plan.spec.model_copy(update=changes))
    try:
        make_plan(spec, plan.model, inventory)
    except PdkitError as exc:
        return exc.reason if exc.setting == "connector" else exc.message
    return ""
