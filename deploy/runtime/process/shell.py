"""What services inherit of the shell from which they are started as processes."""

from __future__ import annotations

from collections.abc import Iterable

# LMCache and vLLM prefer these to what the plan says, and the keys of KV do not count them.
_KEPT_BACK = ("LMCACHE_", "VLLM_", "PROMETHEUS_MULTIPROC_DIR")


def kept_back(names: Iterable[str]) -> list[str]:
    """Return the names of those variables that services do not inherit."""
    return [name for name in names if name.startswith(_KEPT_BACK)]
