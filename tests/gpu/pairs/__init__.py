"""Pairs of vLLM and LMCache, each in one file of pinned wheels."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.wheels import cache_folder, unpacked

HERE = Path(__file__).parent
MP_PAIR = "mp"  # for goldens with LMCache's server; the others are for all others
PAIRS = tuple(sorted(file.stem for file in HERE.glob("*.txt") if file.stem != MP_PAIR))


def pinned(pair: str) -> dict[str, str]:
    """Return package → version."""
    lines = _text(pair).splitlines()
    return dict(line.split()[0].split("==") for line in lines if "==" in line)


def installed(pair: str) -> Path:
    """Return the folder that holds a pair, without vLLM's native modules."""
    text = _text(pair)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return unpacked(text, cache_folder() / "gpu" / name, without="vllm/**/*.so")


def _text(pair: str) -> str:
    return (HERE / f"{pair}.txt").read_text(encoding="utf-8")
