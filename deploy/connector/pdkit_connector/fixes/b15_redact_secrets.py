"""B15: LMCache logs the URL of its remote store, password included."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from typing import Any

from pdkit_connector.redaction import Redactor, install, known_secrets
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

_SECRET = "probe-0c2f1e"  # noqa: S105 - not a secret: the probe looks for it
_URL = f"redis://:{_SECRET}@host:6379"


def probe(_setting: Setting) -> ProbeResult:
    """Find code that logs URLs, and log one to see whether the password comes through."""
    leaks = _leaks()
    if not leaks:
        return ProbeResult(Need.NOT_NEEDED, "no adapter logs its URL, no dump shows a password")
    if _SECRET in _logged(_URL):
        return ProbeResult(Need.NEEDED, f"password shown by {', '.join(leaks)}")
    return ProbeResult(Need.NOT_NEEDED, "log records come out redacted")


def apply(_setting: Setting) -> str:
    """Redact log records, stdout and stderr of this process."""
    secrets = known_secrets()
    install(Redactor(secrets))
    return f"records and standard streams redacted, {len(secrets)} known by value"


def _leaks() -> list[str]:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.storage_backend import remote_backend
    from lmcache.v1.storage_backend.connector import redis_adapter

    found = []
    if _SECRET in str(LMCacheEngineConfig.from_defaults(remote_url=_URL)):
        found.append("the configuration dump")
    for module in (redis_adapter, remote_backend):
        name = module.__name__.rpartition(".")[2]
        found += [f"{name}.py:{line}" for line in url_log_lines(inspect.getsource(module))]
    return found


def url_log_lines(source: str) -> list[int]:
    """Return the lines of `logger` calls with an argument named like a URL."""
    calls = (n for n in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(n, ast.Call))
    return sorted(call.lineno for call in calls if _is_log_call(call) and _names_url(call))


def _is_log_call(call: ast.Call) -> bool:
    target = call.func
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "logger"
    )


def _names_url(call: ast.Call) -> bool:
    nodes: list[Any] = [node for argument in call.args for node in ast.walk(argument)]
    names = [getattr(node, "attr", getattr(node, "id", "")) for node in nodes]
    return any(name == "url" or name.endswith("_url") for name in names)


def _logged(value: str) -> str:
    """Return the text of a record that the process's own record factory makes of `value`."""
    make = logging.getLogRecordFactory()
    return make("probe", logging.INFO, __file__, 0, "URL: %s", (value,), None).getMessage()


FIX = Fix(
    id="B15",
    title="the remote store's password is logged",
    link="none",
    reason=(
        "The Redis adapter, the remote backend, the health check and the configuration dump log "
        "the full URL of the store. The fix masks the user part of every URL, and the password "
        "itself wherever it shows."
    ),
    probe=probe,
    apply=apply,
    # First: the other fixes make LMCache read, and log, its configuration.
    rank=0,
)
