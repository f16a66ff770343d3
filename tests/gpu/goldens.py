"""The engines of the golden documents that run on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden_documents import load

REPO = Path(__file__).resolve().parents[2]
VENDORS = ("cuda", "rocm")
_ROLES = ("producer-", "consumer-", "engine-")


@dataclass(frozen=True)
class Engine:
    """One engine as it is rendered: vLLM's arguments, environment and LMCache's settings.

    Attributes:
        lmcache: "" where engines share no KV.
    """

    golden: str
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    lmcache: str


def files_of(vendor: str) -> list[Path]:
    """Return the goldens of a vendor; the examples in `compose/` are among them."""
    folders = ("compose", "tests/golden/compose", "tests/golden/process")
    return [one for folder in folders for one in sorted((REPO / folder).glob(f"{vendor}-*.yaml"))]


def engines(vendor: str) -> list[Engine]:
    """Return every engine of every golden of a vendor."""
    return [engine for file in files_of(vendor) for engine in _engines(file)]


def _engines(file: Path) -> Iterator[Engine]:
    """Read a document of containers, or of processes, which have the same under other names."""
    document = load(file)
    for name, service in document["services"].items():
        if not name.startswith(_ROLES):
            continue
        words = service.get("command") or service["argv"][1:]
        env = service.get("environment") or service["env"]
        texts = service.get("files") or document.get("x-pdkit", {}).get("files", {})
        yield Engine(
            golden=f"{file.parent.name}/{file.stem}",
            name=name,
            argv=_vllm_argv(words),
            env={key: str(value) for key, value in env.items()},
            lmcache=next((text for path, text in texts.items() if f"/{name}/" in path), ""),
        )


def _vllm_argv(command: list[Any]) -> tuple[str, ...]:
    words = [str(word) for word in command]
    assert words[:2] == ["-m", "pdkit_connector.serve"], words[:2]
    return tuple(words[2:])
