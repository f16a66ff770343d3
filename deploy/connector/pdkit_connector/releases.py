"""Which LMCache is installed, and whether the fixes were proved on it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# Those that tests/versions runs; on any other release each fix goes by what its probe finds.
PROVED = (
    "0.3.9.post2", "0.3.12", "0.3.14", "0.3.15", "0.4.2", "0.4.3", "0.4.7", "0.5.0", "0.5.3",
    "0.5.5", "0.5.6",
)  # fmt: skip


def installed_lmcache() -> str:
    """Return the version of LMCache without its local suffix, "unknown" where nothing says it."""
    try:
        return version("lmcache").partition("+")[0]
    except PackageNotFoundError:
        return "unknown"


def is_proved() -> bool:
    """Tell whether the fixes were proved on the installed release."""
    return installed_lmcache() in PROVED


def release_line() -> str:
    """Return the log line that names the release and says how far the fixes are known on it."""
    known = "yes" if is_proved() else "no, each fix goes by its probe"
    return f'pdkit-connector lmcache={installed_lmcache()} proved="{known}"'
