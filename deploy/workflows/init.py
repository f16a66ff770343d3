"""`deploy init`: write a commented deploy.yaml for this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.config.fields import IN_ENGINES, MAX_COUNT
from deploy.config.model import Model, cached_models
from deploy.config.settings import example_yaml
from deploy.config.spec import StackSpec, settle
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError, MissingGpus, PdkitError
from deploy.home_folder import default_hub_cache
from deploy.planning.inventory import Inventory
from deploy.planning.plan import make_plan
from deploy.runtime.detect import detect_inventory
from deploy.workflows.facts import chosen_vendor

_SHOWN_MODELS = 10


@dataclass(frozen=True)
class Written:
    """`deploy init`.

    Attributes:
        file: the file that was written.
        settings: the settings in it.
        found: what this machine has, in words.
        cached_models: Hugging Face models that are cached here.
    """

    file: str
    settings: Mapping[str, Any]
    found: str
    cached_models: Sequence[str]


@dataclass(frozen=True)
class InitSurvey:
    """What was found on this machine, and the settings that follow from it.

    Attributes:
        machine: processors, memory and GPUs, in words.
        cached: Hugging Face ids of the models whose weights are here.
    """

    settings: dict[str, str | int]
    machine: str
    cached: tuple[str, ...]


def survey_machine() -> InitSurvey:
    """Return the vendor, the number of GPUs and the model to use on this machine.

    Raises:
        MissingGpus: there are GPUs, but none can be used.
    """
    inventory = detect_inventory()
    vendor = _vendor(inventory)
    gpus = inventory.gpus_of(vendor)
    cached = cached_models(default_hub_cache())
    settings: dict[str, str | int] = {"vendor": vendor}
    if gpus:
        settings["gpus"] = min(len(gpus), MAX_COUNT)
    settings["model"] = _model(settings, inventory, cached)
    return InitSurvey(settings, _machine(inventory), tuple(model.ref for model in cached))


def _vendor(inventory: Inventory) -> str:
    """Return the vendor of this machine.

    Raises:
        MissingGpus: there are GPUs, but none can be used.
    """
    try:
        return chosen_vendor(StackSpec(), inventory)
    except MissingGpus as exc:
        # `init` has no option for a vendor.
        raise MissingGpus(
            exc.message, hint="deploy up --vendor cpu, for engines on CPUs", details=exc.details
        ) from exc


def write_example(file: Path, survey: InitSurvey) -> None:
    """Write a new deploy.yaml.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    remarks = {"": f"`deploy init` found {survey.machine}."}
    if survey.cached:
        shown = ", ".join(survey.cached[:_SHOWN_MODELS])
        more = len(survey.cached) - _SHOWN_MODELS
        remarks["model"] = f"in the Hugging Face cache: {shown}" + (
            f" and {more} more" if more > 0 else ""
        )
    text = example_yaml(survey.settings, remarks)
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{file} exists, and init never overwrites a file",
            hint=f"deploy init -f {file.with_name(f'{file.stem}.new.yaml')}",
        ) from None
    except OSError as exc:
        raise ConfigError(
            f"-f {file}: cannot be written ({exc.strerror})",
            hint="deploy init -f FILE, in a folder that exists and that you may write to",
        ) from exc


def _model(settings: dict[str, str | int], inventory: Inventory, cached: Sequence[Model]) -> str:
    """Return the vendor's default model, unless only another one is here and fits."""
    vendor = vendor_named(str(settings["vendor"]))
    there = [model.ref for model in cached]
    if not vendor.has_gpus or vendor.default_model in there:
        return vendor.default_model
    fitting = (model.ref for model in cached if _fits(settings, model, inventory))
    return next(fitting, vendor.default_model)


def _fits(settings: dict[str, str | int], model: Model, inventory: Inventory) -> bool:
    spec = StackSpec.model_validate(settings)
    try:
        make_plan(
            settle(spec, vendor=spec.vendor, runtime="process", connector=IN_ENGINES),
            model,
            inventory,
        )
    except PdkitError:
        return False
    return True


def _machine(inventory: Inventory) -> str:
    gpus = Counter(gpu.name or gpu.vendor for gpu in inventory.gpus)
    named = [f"{number} x {name}" for name, number in gpus.items()] or ["no GPU"]
    memory_gib = inventory.memory_mib / 1024
    return ", ".join((*named, f"{inventory.cpus} CPUs", f"{memory_gib:.0f} GiB of memory"))
