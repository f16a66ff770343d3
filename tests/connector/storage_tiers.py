"""The storage manager of LMCache's server with Redis as its second tier, by the plug-in point."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager
from pdkit_connector.redis_path.second_tier import SecondTier
from redis_servers import eventually

SHAPE = torch.Size((2, 2, 16, 16))
SETTINGS = {
    "pdkit.namespace": "pdkit:test:1",
    # For a Redis that is well: nothing waits that long but on a machine that hardly gets on.
    "pdkit.lookup_s": 20,
    "pdkit.load_s": 30,
    "pdkit.store_s": 30,
    "pdkit.silent_s": 20,
}


def kind(shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size(shape)], [dtype])


def keys(count: int, **facts: Any) -> list[ObjectKey]:
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    named = {"model_name": "models/tiny", "kv_rank": rank, **facts}
    return [ObjectKey(chunk_hash=bytes([n + 1]) * 32, **named) for n in range(count)]


def settings_file(folder: Path, url: str | list[str], **more: Any) -> Path:
    file = folder / "kv-server.yaml"
    own = {f"pdkit.{name}": value for name, value in more.items()}
    file.write_text(yaml.safe_dump({**SETTINGS, "pdkit.url": url, **own}))
    return file


def plugin(file: Path) -> str:
    """Return what `--l2-adapter` is given."""
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "pdkit_connector.redis_path.second_tier",
            "class_name": "SecondTier",
            "adapter_params": {"settings_file": str(file)},
        }
    )


class Tiers:
    """A server's storage: its memory, which starts empty, and Redis."""

    def __init__(self, file: Path) -> None:
        self.manager = StorageManager(
            parse_args(
                [
                    "--l1-size-gb", "0.01", "--no-l1-use-lazy", "--eviction-policy", "LRU",
                    "--l2-prefetch-policy", "retain",
                    "--l2-adapter", plugin(file),
                ]
            )
        )  # fmt: skip
        ((_, self.second),) = self.manager.l2_adapters()
        assert isinstance(self.second, SecondTier)

    def store(self, chunks: Sequence[ObjectKey], of: MemoryLayoutDesc | None = None) -> list[bytes]:
        """Write random chunks, as an engine does; return their bytes."""
        reserved = self.manager.reserve_write(list(chunks), of or kind())
        assert len(reserved) == len(chunks)
        for key in chunks:
            one = reserved[key].byte_array
            memoryview(one).cast("B")[:] = torch.randint(0, 256, (len(one),)).byte().numpy().data
        written = [bytes(reserved[key].byte_array) for key in chunks]
        self.manager.finish_write(list(chunks))
        return written

    def stored(
        self, chunks: Sequence[ObjectKey], of: MemoryLayoutDesc | None = None
    ) -> list[bytes]:
        """Write chunks, and wait until Redis has them, and LMCache has let go of them."""
        written = self.store(chunks, of)
        of = of or kind()
        eventually(lambda: len(self.second.held(chunks, {0: of})) == len(chunks), 30)
        controllers = self.manager._store_controllers.values()
        eventually(lambda: not any(one._in_flight_tasks for one in controllers), 30)
        return written

    def found(
        self, *rows: Sequence[ObjectKey], of: MemoryLayoutDesc | None = None
    ) -> tuple[int, int]:
        """Prefetch rows of keys, as a lookup does; return the hits of the first and second tier."""
        groups = [
            GroupedObjectKeys(list(row), row[0].object_group_id, of or kind()) for row in rows
        ]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(groups))
        assert self.manager.wait_prefetch_status(handle, 60)
        result = self.manager.query_prefetch_status(handle)
        self._locked = [
            key for row, hit in zip(rows, result.hit_cells, strict=True) for key in hit.gather(row)
        ]
        return result.l1_hit_count, result.l2_hit_count

    def read(self) -> list[bytes]:
        """Return the bytes of what was found last, and let go of it."""
        if not self._locked:
            return []
        with self.manager.read_prefetched_results(self._locked) as objects:
            assert objects is not None
            read = [bytes(one.byte_array) for one in objects]
        self.manager.finish_read_prefetched(self._locked)
        return read

    def close(self) -> None:
        self.manager.close()
