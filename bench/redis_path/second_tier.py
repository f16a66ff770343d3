"""The kit's second tier of LMCache's server, as its storage manager drives it."""

from __future__ import annotations

import json
import select
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.redis_path.contender import CHUNK, PATIENCE_S, Span, Where, measured


class OurSecondTier:
    """The kit's L2 adapter, by the Unix socket, between memory that is there already."""

    def __init__(self, where: Where, engine: int) -> None:
        from pdkit_connector.redis_path.second_tier import SecondTier

        self._engine = engine
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "settings.yaml")
            settings = {
                "pdkit.url": f"unix://{where.socket}",
                "pdkit.namespace": f"pdkit:bench:second:{engine}",
                # A machine that does other work may be slow; that is measured, not given up.
                "pdkit.load_s": PATIENCE_S,
                "pdkit.store_s": PATIENCE_S,
            }
            file.write_text(json.dumps(settings), encoding="utf-8")  # which is YAML, too
            self._tier: Any = SecondTier({"settings_file": str(file)})
        self._keys: list[Any] = []
        self._objects: list[Any] = []
        self._layout: Any = None

    def open(self, value_bytes: int, count: int) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

        shape = torch.Size((value_bytes // 2,))
        self._layout = MemoryLayoutDesc([shape], [torch.bfloat16])
        self._keys = [
            ObjectKey(value_bytes.to_bytes(8, "big") + n.to_bytes(24, "big"), "bench", CHUNK)
            for n in range(count)
        ]
        self._objects = [_object(shape) for _ in range(count)]

    def store(self) -> Span:
        for number, one in enumerate(self._objects):
            one.tensor.fill_(number)
        tier = self._tier
        with measured() as span:
            task = tier.submit_store_task(self._keys, self._objects)
            results = _awaited(tier.get_store_event_fd(), tier.pop_completed_store_tasks)
        if not results[task].is_successful():
            raise RuntimeError("a value was not stored")
        return span

    def retrieve(self) -> Span:
        for one in self._objects:
            one.tensor.fill_(-1)
        tier = self._tier
        with measured() as span:
            task = tier.submit_load_task(self._keys, self._objects)
            _awaited(tier.get_load_event_fd(), lambda: tier.query_load_result(task))
        for number, one in enumerate(self._objects):
            if not bool((one.tensor[[0, -1]] == number).all()):
                raise RuntimeError(f"wrong bytes in value {number}, or it is missing")
        return span

    def lookup(self, count: int) -> Span:
        tier = self._tier
        with measured() as span:
            task = tier.submit_lookup_and_lock_task(self._keys[:count], {0: self._layout})
            found = _awaited(
                tier.get_lookup_and_lock_event_fd(),
                lambda: tier.query_lookup_and_lock_result(task),
            )
        if found.popcount() != count:
            raise RuntimeError(f"{found.popcount()} of {count} values are there")
        return span


def _object(shape: Any) -> Any:
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    memory = torch.zeros(shape, dtype=torch.bfloat16)
    facts = MemoryObjMetadata(
        shape, torch.bfloat16, memory.data_ptr(), memory.nbytes, 1, fmt=MemoryFormat.KV_2LTD
    )
    return TensorMemoryObj(memory.view(torch.uint8), facts, parent_allocator=None)


def _awaited(descriptor: int, result: Callable[[], Any]) -> Any:
    """Wait for an adapter's event, and return its result."""
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(PATIENCE_S * 1000):
        raise RuntimeError("no end in time")
    consume_fd(descriptor)
    return result()
