"""Preflight: quick checks whether a machine fits a plan, for `up` and `doctor`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from deploy.assets import connector_path
from deploy.config.catalog import EngineImage, ServiceImage, load_catalog, reference
from deploy.config.runtimes import RUNTIMES
from deploy.connector.pdkit_connector.identity.model_files import is_offline
from deploy.doctor.finding import Finding
from deploy.doctor.gpus import planned
from deploy.doctor.observed import DisksSeen, EngineCode, HubSeen, ImageSeen, Seen, StackSeen
from deploy.doctor.rules import failed, findings, warned
from deploy.errors import ConfigError, MachineUnfit, PdkitError
from deploy.runtime.compose.docker import docker_info
from deploy.runtime.compose.images import FoundImage
from deploy.runtime.home import Home
from deploy.runtime.observe import (
    CODE_PROGRAM,
    code_of_image,
    code_of_interpreter,
    place,
    see_gpus,
    see_host,
)
from deploy.runtime.own_files import read_json
from deploy.workflows.fixes import place_of, remember
from deploy.workflows.images import find_any
from deploy.workflows.prepare import Prepared, Report, find_model
from deploy.workflows.software import Containers
from deploy.workflows.stack_images import stack_images

# Rules that need the contents of the image or interpreter.
_OF_CODE = ("gpu.driver", "gpu.arch", "engine.plug_ins", "engine.native")
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")


def require_fit(prepared: Prepared, home: Home, report: Report) -> None:
    """Report each problem in a line, and refuse a machine that cannot run the stack.

    Raises:
        MachineUnfit: this machine cannot run it; nothing was started.
    """
    info = docker_info() if isinstance(prepared.facts.software, Containers) else None
    found = findings(quick_look(prepared, home, info))
    # Missing images are pulled or built later.
    _act_on([one for one in found if one.id != "docker.images"], report)


def require_gpus_beside(prepared: Prepared, running: Sequence[str], report: Report) -> None:
    """Apply the GPU rules of `require_fit` to engines that start beside running ones.

    Raises:
        MachineUnfit: these GPUs cannot run them; nothing was started.
    """
    if not prepared.plan.vendor.has_gpus:
        return
    bare = _bare(prepared)
    seen = replace(
        bare,
        images=see_images(prepared),
        gpus=see_gpus(planned(bare)),
        stack=StackSeen(running=tuple(running)),
    )
    _act_on([one for one in findings(seen) if one.area == "gpu"], report)


def require_shared_memory(prepared: Prepared, home: Home, report: Report) -> None:
    """Apply the rule of `require_fit` on shared memory to a plan that none of it serves yet.

    Raises:
        MachineUnfit: the engines' KV does not fit into it; nothing was started.
    """
    if prepared.plan.shared_memory_mib:
        seen = replace(_bare(prepared), host=home.host or see_host())
        _act_on([one for one in findings(seen) if one.id == "host.shm"], report)


def refusal(stops: Sequence[Finding]) -> PdkitError:
    """Return findings as one error; its hint is the fix of the first."""
    first = stops[0]
    kind = ConfigError if first.usage else MachineUnfit
    return kind(
        f"{first.message}: {first.why}" if first.why else first.message,
        hint=first.fix,
        details=tuple(f"also {one.id}: {one.message} ({one.fix})" for one in stops[1:]),
    )


def require_code(prepared: Prepared, home: Home, report: Report) -> None:
    """Check the code that engines on GPUs will import, as `require_fit` checks the machine.

    Raises:
        MachineUnfit: it cannot run on these GPUs, or with the kit's connector.
    """
    if prepared.plan.vendor.has_gpus:
        seen = _bare(prepared)
        seen = replace(seen, gpus=see_gpus(planned(seen)), code=see_code(prepared, home))
        _act_on([one for one in findings(seen) if one.id in _OF_CODE], report)


def _act_on(found: list[Finding], report: Report) -> None:
    for one in warned(found):
        report(f"warning: {one.message}: {one.why} ({one.fix}) [{one.id}]")
    if stops := failed(found):
        raise refusal(stops)


def quick_look(prepared: Prepared, home: Home, info: Mapping[str, Any] | None) -> Seen:
    """Return the quick observations that `up` does not make elsewhere.

    Args:
        info: `docker info`; None if Docker was not asked.
    """
    bare = _bare(prepared)
    gpus = planned(bare)
    return replace(
        bare,
        images=see_images(prepared) if info is not None else (),
        gpus=see_gpus(gpus) if gpus else None,
        host=home.host or see_host(),
        disks=see_disks(prepared, home, info or {}),
        hub=see_hub(prepared, home),
    )


def _bare(prepared: Prepared) -> Seen:
    return Seen(
        spec=prepared.spec,
        inventory=prepared.inventory,
        plan=prepared.plan,
        measured=prepared.measured,
    )


def see_images(prepared: Prepared) -> tuple[ImageSeen, ...]:
    """Return the images of a plan, the engines' first; none where they are processes."""
    if not isinstance(prepared.facts.software, Containers):
        return ()
    images = stack_images(prepared.spec, prepared.facts.vendor)
    return tuple(map(_image, images.needed(user_redis=prepared.plan.user_redis)))


def _image(image: EngineImage | ServiceImage) -> ImageSeen:
    catalog = load_catalog()
    known = catalog.engines.get(image.name) or catalog.services.get(image.name)
    ours = known is not None and known.image == image.image
    size_gib = image.size_gib if ours else None  # unknown for a user's own image
    get = f"deploy images {'build' if image.build else 'pull'} {image.name}"
    found = _find(image)
    return ImageSeen(
        reference=found.reference if found else reference(image),
        here=found is not None,
        size_mib=None if size_gib is None else round(size_gib * 1024),
        size_sure=not image.size_is_estimate,
        get=get if ours else f"docker pull {image.image}",
        cuda=image.cuda if isinstance(image, EngineImage) else "",
        archs=image.archs if isinstance(image, EngineImage) else (),
    )


def _find(image: EngineImage | ServiceImage) -> FoundImage | None:
    try:
        return find_any(image)
    except PdkitError:
        return None


def see_disks(prepared: Prepared, home: Home, info: Mapping[str, Any]) -> DisksSeen:
    """Return space and permissions of the folders for images, models and the kit's files.

    Args:
        info: `docker info`, which names the folder for images.
    """
    as_user = RUNTIMES[prepared.plan.runtime].as_user
    root = info.get("DockerRootDir")
    return DisksSeen(
        state=place(home.state),
        images=place(str(root), ours=False) if root else None,
        # Where another user writes, `up` looks at that folder's owner itself.
        hub=place(str(prepared.hub_cache), ours=as_user)
        if prepared.model.source == "hub"
        else None,
    )


def see_hub(prepared: Prepared, home: Home) -> HubSeen | None:
    """Return the cached facts of a hub's model; None for other models."""
    spec = prepared.spec
    if prepared.model.source != "hub":
        return None
    here = find_model(spec, home, prepared.facts.vendor)
    told = dict(spec.engine.env)
    if RUNTIMES[prepared.plan.runtime].as_user:
        told = {**os.environ, **told}
    named = [name for name in _PROXIES if os.environ.get(name) or os.environ.get(name.lower())]
    return HubSeen(
        cached=bool(here.version and here.weight_bytes),
        offline=is_offline(told),
        cache=str(prepared.hub_cache),
        proxies=tuple(name for name in named if name not in spec.engine.env),
    )


def see_code(prepared: Prepared, home: Home) -> EngineCode:
    """Inspect the code that engines will import. A good result is cached, by its digest."""
    where, gpus = place_of(prepared), prepared.plan.vendor.has_gpus
    digest = hashlib.sha256(f"{where.key(connector_path())}{gpus}{CODE_PROGRAM}".encode())
    file = home.cache / "doctor" / f"{digest.hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        kept = read_json(file)
        lists = {name: tuple(kept[name]) for name in ("archs", "native_archs")}
        return EngineCode(**{**kept, **lists})
    if where.image_id:
        code = code_of_image(
            where.image_id, where.interpreter, where.what, where.devices, gpus=gpus
        )
    else:
        code = code_of_interpreter(where.interpreter, where.environ, gpus=gpus)
    if not code.trouble and not code.native_trouble and all(code.plugs.values()):
        remember(file, asdict(code))
    return code
