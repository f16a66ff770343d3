"""Refuse arguments and variables of engines that the plan decides, or that make KV unreadable."""

from __future__ import annotations

from deploy.config.engine_inputs import RefusedSetting, refused_option, refused_variable
from deploy.config.spec import SettledSpec
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError


def check_engine_settings(spec: SettledSpec, *, shares_kv: bool) -> None:
    """Refuse arguments and variables by which engines would not be as they are planned.

    Raises:
        ConfigError: naming the first.
    """
    for argument in spec.engine.args:
        name, refused = refused_option(argument, shares_kv=shares_kv)
        if refused:
            raise _error(spec, "engine.args", f"'{name}'", refused)
    for name in spec.engine.env:
        if refused := refused_variable(name):
            raise _error(spec, "engine.env", name, refused)


def _error(spec: SettledSpec, setting: str, name: str, refused: RefusedSetting) -> ConfigError:
    hint = refused.instead or f"leave it out of {setting}"
    if refused.for_gpus and (visible := vendor_named(spec.vendor).visible_devices):
        hint = f"{visible}=0,1 deploy up, which plans with these GPUs only"
    return ConfigError(f"{name} {refused.why}", setting=setting, hint=hint)
