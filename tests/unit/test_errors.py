"""The tree of errors: codes that scripts rely on."""

from __future__ import annotations

import pytest

from deploy import errors
from deploy.errors import PdkitError

CONTRACT = {
    "CheckFailed": 1,
    "UsageError": 2,
    "ConfigError": 2,
    "ModelChanged": 2,
    "StateError": 2,
    "MachineError": 3,
    "MissingTool": 3,
    "PortTaken": 3,
    "NotEnoughMemory": 3,
    "MissingGpus": 3,
    "MissingImage": 3,
    "MissingModel": 3,
    "MachineUnfit": 3,
    "RedisUnreachable": 3,
    "FixFailed": 3,
    "DockerUnavailable": 3,
    "EngineUnreachable": 3,
    "StackLocked": 3,
    "StackUnhealthy": 4,
    "OutOfMemory": 4,
    "SwapFailed": 4,
    "Interrupted": 130,
}


def subclasses(base: type[PdkitError]) -> set[type[PdkitError]]:
    return set(base.__subclasses__()).union(*map(subclasses, base.__subclasses__()))


def test_exit_codes_are_those_of_the_contract() -> None:
    assert {error.__name__: error.exit_code for error in subclasses(PdkitError)} == CONTRACT


def test_error_codes_are_unique() -> None:
    codes = [error.code for error in subclasses(PdkitError)]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("name", CONTRACT)
def test_the_docstring_draws_the_whole_tree(name: str) -> None:
    assert name in (errors.__doc__ or "")
