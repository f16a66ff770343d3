"""What the check inside a cluster knows of an exported stack: what its plan was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deploy.assets import Kit
from deploy.config.fields import IN_ENGINES
from deploy.config.spec import StackSpec, restored_spec, settle
from deploy.config.vendors import vendor_named
from deploy.errors import StateError
from deploy.planning.inventory import Inventory
from deploy.planning.machines import across
from deploy.planning.plan import Plan, make_plan
from deploy.stack.cluster.layout import ClusterLayout
from deploy.stack.containers import ContainerImages
from deploy.stack.layout import REDIS_URL, SECRETS
from deploy.workflows.prepare import Facts, Prepared
from deploy.workflows.saved_state import restored_facts, restored_model
from deploy.workflows.software import Containers

FORMAT = 1
# A stack that is only looked at needs no files of the kit.
_NO_KIT = Kit(Path(), Path(), Path())
# Files and addresses of the machine that exported; no pod has them.
_OF_THE_MACHINE: Any = {
    "bind": True,
    "hub_cache": True,
    "hf_token_file": True,
    "api_key_file": True,
    "engine": {"python", "bind", "key_file"},
    "redis": {"server"},
}


@dataclass(frozen=True)
class ExportedStack:
    """An exported stack, planned again.

    Attributes:
        prepared: with all engines of the export; a cluster may have more.
    """

    namespace: str
    prepared: Prepared
    layout: ClusterLayout


def cluster_layout(images: ContainerImages, kit: Kit) -> ClusterLayout:
    """Return the layout of a stack whose pods run these images."""
    return ClusterLayout(
        run_dir=Path(),
        images=images,
        user="",
        kit=kit,
        engine_cache=Path("cache"),
        hub_cache=Path("hub"),
        hub_token=True,
    )


def cluster_document(
    spec: StackSpec,
    plan: Plan,
    machine: Inventory,
    images: ContainerImages,
    form: Mapping[str, Any],
) -> str:
    """Return the document of a stack; it holds no secret, and no path of this machine.

    Args:
        plan: of the stack, whatever its number of machines.
        form: the namespace, and the number of machines.
    """
    told = spec.model_dump(mode="json", exclude_defaults=True, exclude=_OF_THE_MACHINE)
    if plan.user_redis:
        told["redis"]["url_file"] = str(SECRETS / REDIS_URL)
    software = Containers(images, user="", hub_cache="")
    facts = Facts(replace(machine, seen=()), plan.vendor.name, "compose", software)
    document = {
        "format": FORMAT,
        **form,
        "spec": told,
        "machine": asdict(facts),
        "model": asdict(plan.model),
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def read_document(text: str) -> ExportedStack:
    """Return the stack that a document describes.

    Raises:
        StateError: another version of the kit wrote it.
    """
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}")
        spec = restored_spec(document["spec"])
        facts, model = restored_facts(document["machine"]), restored_model(document["model"])
        machines, namespace = int(document["machines"]), str(document["namespace"])
        if not isinstance(facts.software, Containers):
            raise TypeError("a cluster runs containers")
    except (ValidationError, KeyError, TypeError, ValueError) as exc:
        raise StateError(
            f"the document of the exported stack does not fit this version of pdkit: {exc}",
            hint="deploy export kubernetes -o FOLDER, which writes it again",
        ) from exc
    vendor = vendor_named(facts.vendor).name
    settled = settle(spec, vendor=vendor, runtime="compose", connector=IN_ENGINES)
    plan = across(make_plan(settled, model, facts.inventory), machines)
    layout = cluster_layout(facts.software.images, _NO_KIT)
    return ExportedStack(namespace, Prepared(spec, facts, model, plan, layout), layout)
