"""Fork an engine's core and workers from a process that has imported vLLM; spawn none of them.

vLLM spawns them on CPUs: a new interpreter imports torch and vLLM again, about a third of the
CPU time of an engine's start. Here `multiprocessing`'s own fork server stands in for "spawn",
itself forked from this process after its imports, while it has one thread, no event loop and no
fix applied.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
from multiprocessing import connection, context, forkserver
from typing import Any

# What an engine's core needs of vLLM, whatever the model. Not LMCache: it imports numba, whose
# bindings vLLM trips over when it looks for Triton kernels in every module that it finds.
_PRELOADED = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.v1.attention.backends.cpu_attn",
)


def preload() -> None:
    """Import what the engine's core would import.

    Raises:
        ImportError: vLLM is broken.
    """
    for name in _PRELOADED:
        importlib.import_module(name)


def start() -> None:
    """Fork the server. This process and its forks then start their children through it."""
    server: Any = forkserver._forkserver
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)  # noqa: PTH101 - the address is text for multiprocessing, too
        listener.listen()
        gc.freeze()  # a collection in a child would copy every page that it shares
        server._forkserver_address = address
        context._concrete_contexts["spawn"] = _Context()  # type: ignore[attr-defined]
        if (pid := os.fork()) == 0:
            os.close(alive_w)
            server.ensure_running = _do_nothing
            _serve(listener.fileno(), alive_r)
    os.close(alive_r)
    server._forkserver_alive_fd = alive_w
    server._forkserver_pid = pid


def _do_nothing() -> None:
    """Replace the check of a server that is not this process's child."""


def _serve(listener: int, alive_r: int) -> None:
    """Fork processes until the one that asks for them has ended."""
    try:
        forkserver.main(listener, alive_r, [])
    finally:
        os._exit(0)


class _Process(context.ForkServerProcess):
    """A forked process that has the environment of the moment it is started in, as if spawned."""

    def start(self) -> None:
        self._environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        # Only what differs: the process's title is written over the first environment in memory.
        for name in os.environ.keys() - self._environ.keys():
            del os.environ[name]
        for name, value in self._environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        gc.enable()
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process
