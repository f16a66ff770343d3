"""Start vLLM's API server after every fix has been applied: `python -m pdkit_connector.serve`.

vLLM makes its connector late, when the model is loaded. What would fail then fails here first, in
the seconds that it takes to import what the server imports anyway. An engine without a connector
needs no fix. Arguments are vLLM's own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pdkit_connector import fork_server
from pdkit_connector.engine_key import MIDDLEWARE, read_key
from pdkit_connector.errors import ConnectorError
from pdkit_connector.identity.kv_identity import take_rows_early
from pdkit_connector.identity.model_files import (
    commit_in_cache,
    difference_to_plan,
    is_offline,
    named_model,
    named_revision,
    take_digests,
)
from pdkit_connector.identity.model_watch import ModelWatch
from pdkit_connector.log import bound_logs, get_logger, leave_out_polls
from pdkit_connector.metrics import EngineCollector
from pdkit_connector.process_numbers import take_numbers
from pdkit_connector.registry import Registry, Setting, disabled_ids, discover
from pdkit_connector.worker_socket import engine_name, make_unguessable

_SERVER = "vllm.entrypoints.openai.api_server"
_KV_TRANSFER = "--kv-transfer-config"
# All by which vLLM may be told to load a connector, short forms and files included.
_CONNECTOR_OPTIONS = ("--kv-t", "--kv-o", "--config")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_S = 10.0
_POLL_S = 1e-4  # of steps that take some milliseconds
SERVER_CONNECTOR = "pdkit_connector.server_connector"


def main() -> None:
    """Check, then become the server; exit with 3 if the model is another one, or a fix fails."""
    make_unguessable()
    try:
        take_numbers()
        sys.argv[1:] = held_to_commit(sys.argv[1:])
        require_planned_model(sys.argv[1:])
        with without_garbage_collection():
            fork_cores_on_cpus()
            check(sys.argv[1:])
    except ConnectorError as exc:
        get_logger().error("pdkit-connector ERROR %s", exc)
        sys.exit(3)
    publish_counts()
    bound_logs()
    leave_out_polls()
    # This module stays the process's main one, which each process that vLLM spawns imports again:
    # that of the server would cost each of them seconds.
    runpy.run_module(_SERVER, run_name="__main__")


def held_to_commit(argv: Sequence[str]) -> list[str]:
    """Return the arguments with the commit of a hub's model, where they name none.

    A branch moves: an engine that starts later would load other weights, and KV of the earlier. The
    commit is part of the engine's identity. Where the hub does not answer, it is the cached one,
    which vLLM loads, too.
    """
    model, revision = named_model(argv), named_revision(argv)
    known = not model or model.startswith("/") or _COMMIT.fullmatch(revision)
    if known or is_offline(os.environ):
        return [*argv]
    from huggingface_hub import HfApi

    try:
        commit = HfApi().model_info(model, revision=revision or None, timeout=_HUB_S).sha
    except Exception as exc:  # noqa: BLE001 - vLLM says better what is wrong with a model
        commit = commit_in_cache(argv)
        get_logger().warning(
            "pdkit-connector the hub does not name the commit of %s (%s); cached: %s",
            model, type(exc).__name__, commit or "none",
        )  # fmt: skip
    return [*argv, "--revision", commit] if commit else [*argv]


def require_planned_model(argv: Sequence[str]) -> None:
    """Refuse other files than those that the stack was started with, such as in a model folder.

    Here and not only in the kit's commands: Docker starts engines again by itself. Files that the
    plan does not know, as in a pod's volume, become part of this engine's identity.

    Raises:
        ConnectorError: naming the folder.
    """
    if differs := difference_to_plan(argv):
        raise ConnectorError(
            f"{differs}, so this engine would load wrong KV; deploy restart names the file and the "
            "next command"
        )
    take_digests(argv)


def fork_cores_on_cpus() -> None:
    """Let vLLM's core be forked from here where no GPU's driver forbids it.

    Raises:
        ImportError: vLLM itself is broken.
    """
    # Before vLLM, which imports `importlib_metadata`: from then on, transformers' look at the
    # installed packages asks for each of their files whether it exists.
    import transformers.utils.import_utils  # noqa: F401

    with without_inductor():
        import vllm  # noqa: F401
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        fork_server.preload()
        sleep_between_polls()
        allow_amx()
        fork_server.start()


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    """For vLLM's import: it imports Torch's compiler only to change it, and goes on if it cannot.

    Where Dynamo is off nothing is compiled. Whatever asks for the compiler later gets it.
    """
    name = "torch._inductor.lowering"
    hidden = os.environ.get("TORCHDYNAMO_DISABLE") == "1" and name not in sys.modules
    modules: dict[str, Any] = sys.modules  # None is what makes an import fail
    if hidden:
        modules[name] = None
    try:
        yield
    finally:
        if hidden:
            del modules[name]


def sleep_between_polls() -> None:
    """Let a rank's core and workers sleep while they wait for each other's messages.

    For a second after each message vLLM only yields the processor between two looks at the shared
    memory, holding Python's lock. Where ranks share cores, those that wait keep those that compute
    from running, and their own threads too: engines of two ranks on two cores got no
    answer from LMCache's server within five seconds.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(_POLL_S)


def allow_amx() -> None:
    """Ask the kernel for AMX's registers, for this process and those forked from it.

    vLLM's attention uses them on processors that have AMX, and leaves asking to oneDNN, which does
    so at the first large product of matrices. An engine whose first step computes a single token,
    all others having been loaded, would die of an illegal instruction.
    """
    import torch

    torch.cpu._init_amx()


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For imports: they make millions of objects and no garbage.

    Collecting it takes a fifth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check(argv: Sequence[str]) -> None:
    """Read the server's key, and apply every fix in this process, which holds no KV.

    The fixes are for LMCache: an engine without a connector imports neither. One with a connector
    has the identity of its KV taken when vLLM makes its configuration.

    Raises:
        ConnectorError: there is no key.
        ImportError: vLLM or LMCache itself is broken, which fixes cannot help.
        FixFailed: a needed fix does not take.
        UnsupportedSetting: a bug that has no fix affects this configuration.
    """
    if MIDDLEWARE in argv:
        read_key()
    from vllm.config import VllmConfig  # noqa: F401

    if not may_load_connector(argv):
        return
    import lmcache  # noqa: F401

    take_rows_early()
    if transfer_config(argv).get("kv_connector_module_path") == SERVER_CONNECTOR:
        return  # the fixes are for LMCache inside the engine
    registry = Registry(discover())
    registry.apply(
        Setting(engine=True, extra_config=extra_config(argv)), disabled_ids(registry.fixes)
    )
    registry.require_no_failure()


def publish_counts() -> None:
    """Show the workers' counts, and a change of the model's files, on the server's metrics page.

    Only where the kit asked for it.
    """
    if name := engine_name():
        from prometheus_client import REGISTRY

        REGISTRY.register(EngineCollector(name))
        watch = ModelWatch(sys.argv[1:])
        watch.start()
        REGISTRY.register(watch)


def may_load_connector(argv: Sequence[str]) -> bool:
    """Tell whether vLLM's arguments can name a connector; vLLM reads `_` there as `-`."""
    return any(arg.replace("_", "-").startswith(_CONNECTOR_OPTIONS) for arg in argv)


def extra_config(argv: Sequence[str]) -> dict[str, Any]:
    """Return `kv_connector_extra_config` of vLLM's arguments; {} where there is none to read."""
    extra = transfer_config(argv).get("kv_connector_extra_config")
    return dict(extra) if isinstance(extra, dict) else {}


def transfer_config(argv: Sequence[str]) -> dict[str, Any]:
    """Return `--kv-transfer-config` of vLLM's arguments; {} where there is none to read."""
    for name, value in itertools.pairwise(argv):
        if name == _KV_TRANSFER:
            try:
                return dict(json.loads(value))
            except (ValueError, TypeError):
                return {}  # vLLM says what is wrong with it
    return {}


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that vLLM spawned, which needs this in any case
    with without_garbage_collection():
        import vllm.config  # noqa: F401
