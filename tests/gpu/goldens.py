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
_SERVER = "kv-server"


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


def files_of(vendor: str, *, mp: bool = False) -> list[Path]:
    """Return the goldens of a vendor without LMCache's server, or with; `compose/` has some."""
    folders = ("compose", "tests/golden/compose", "tests/golden/process")
    files = (one for name in folders for one in sorted((REPO / name).glob(f"{vendor}-*.yaml")))
    return [one for one in files if (_SERVER in load(one)["services"]) is mp]


def engines(vendor: str) -> list[Engine]:
    """Return every engine of every golden of a vendor that has no LMCache server."""
    return [engine for file in files_of(vendor) for engine in _engines(file)]


def mp_engines(vendor: str) -> list[Engine]:
    """Return every engine of every golden of a vendor that has LMCache's server."""
    return [engine for file in files_of(vendor, mp=True) for engine in _engines(file)]


def server_argv(vendor: str) -> dict[str, list[str]]:
    """Return golden → the arguments of LMCache's server after its two sockets."""
    return {
        f"{file.parent.name}/{file.stem}": _words(load(file)["services"][_SERVER])[4:]
        for file in files_of(vendor, mp=True)
    }


def _engines(file: Path) -> Iterator[Engine]:
    """Read a document of containers, or of processes, which have the same under other names."""
    document = load(file)
    for name, service in document["services"].items():
        if not name.startswith(_ROLES):
            continue
        words = _words(service)
        env = service.get("environment") or service["env"]
        texts = service.get("files") or document.get("x-pdkit", {}).get("files", {})
        yield Engine(
            golden=f"{file.parent.name}/{file.stem}",
            name=name,
            argv=_vllm_argv(words),
            env={key: str(value) for key, value in env.items()},
            lmcache=next((text for path, text in texts.items() if f"/{name}/" in path), ""),
        )


def _words(service: Mapping[str, Any]) -> list[str]:
    """Return a service's arguments after the interpreter."""
    return [str(word) for word in service.get("command") or service["argv"][1:]]


def _vllm_argv(words: list[str]) -> tuple[str, ...]:
    assert words[:2] == ["-m", "pdkit_connector.serve"], words[:2]
    return tuple(words[2:])
