"""B24: LMCache keeps its metrics in a folder of a fixed name that all users of a machine share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

from pdkit_connector.in_engine.layer_steps import replace_method, was_replaced
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_SHARED = "/tmp/lmcache_prometheus"  # noqa: S108 - what the probe looks for
_METHODS = ("__init__", "_ensure_multiprocess_dir")


def probe(_setting: Setting) -> ProbeResult:
    """Look for the fixed name in the code that makes the folder."""
    from lmcache.observability import PrometheusLogger

    if was_replaced(PrometheusLogger.__init__, _with_own_folder):
        return ProbeResult(Need.NOT_NEEDED, "metrics are kept in a private folder")
    if named := [name for name in _METHODS if _names_folder(getattr(PrometheusLogger, name, None))]:
        return ProbeResult(Need.NEEDED, f"{named[0]} names {_SHARED}")
    return ProbeResult(Need.NOT_NEEDED, f"nothing names {_SHARED}")


def _names_folder(method: Any) -> bool:
    return _SHARED in getattr(getattr(method, "__code__", None), "co_consts", ())


def apply(_setting: Setting) -> str:
    """Make a private folder before LMCache asks for the shared one."""
    from lmcache.observability import PrometheusLogger

    replace_method(PrometheusLogger, "__init__", _with_own_folder)
    return "metrics are kept in a private folder"


def _with_own_folder(init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # Not sooner: vLLM serves its metrics in another way where it finds this variable.
    if not os.environ.get(_VARIABLE):
        folder = os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="lmcache_prometheus-")
        # Also runs in a process of multiprocessing's, such as an engine's core.
        Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    init(*args, **kwargs)


FIX = Fix(
    id="B24",
    title="metrics are kept in a folder that any user can take",
    link="none",
    reason=(
        "LMCache writes its metrics into /tmp/lmcache_prometheus, whoever made it: if another user "
        "did, or made a file of that name, no engine starts. The fix makes a private "
        "folder below TMPDIR, and removes it when the process ends."
    ),
    probe=probe,
    apply=apply,
)
