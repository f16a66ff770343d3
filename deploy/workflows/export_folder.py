"""The folder of an export: replaces the last export's files, never edited ones."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.config.spec import StackSpec
from deploy.errors import ConfigError
from deploy.stack.cluster.layout import workload
from deploy.stack.cluster.pods import SECRET
from deploy.stack.layout import API_KEY, HUB_TOKEN, REDIS_URL
from deploy.workflows.export import PLAIN, Export

MARKER = ".pdkit-export.json"
_ANOTHER = "deploy export kubernetes -o FOLDER, with another folder"


@dataclass(frozen=True)
class Exported:
    """A folder for another place than this machine.

    Attributes:
        pods: vendor → workload → number of pods.
        images: images that nodes must be able to pull.
        notes: what was assumed.
        then: the commands to type next.
    """

    namespace: str
    files: Sequence[str]
    pods: Mapping[str, dict[str, int]]
    images: Sequence[str]
    notes: Sequence[str]
    then: Sequence[str]


def write_export(made: Export, folder: Path) -> list[Path]:
    """Write the files, and remove those that only the last export had; return the paths.

    Raises:
        ConfigError: a file is there that no export wrote, or that was edited since; nothing is
            changed then.
    """
    before = _last_export(folder)
    edited = sorted(
        name for name in {*before, *made.files} if _is_not_ours(folder, name, before.get(name))
    )
    if edited:
        raise ConfigError(
            f"-o: {folder / edited[0]} was not written by an export, or was edited since",
            hint=f"{_ANOTHER}; keep changes in a kustomization of your own that names an overlay "
            "as its resource",
            details=tuple(str(folder / name) for name in edited),
        )
    try:
        return _written(made, folder, before)
    except OSError as exc:
        raise ConfigError(
            f"-o: '{folder}' cannot be written: {exc.strerror}", hint=_ANOTHER
        ) from exc


def _written(made: Export, folder: Path, before: dict[str, str]) -> list[Path]:
    for name in before.keys() - made.files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, text in made.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    digests = {name: _digest(folder / name) for name in sorted(made.files)}
    marker = json.dumps({"files": digests}, indent=1) + "\n"
    (folder / MARKER).unlink(missing_ok=True)  # it may be a link
    (folder / MARKER).write_text(marker, encoding="utf-8")
    return [folder / name for name in made.files]


def _last_export(folder: Path) -> dict[str, str]:
    """Return path → digest of what the last export wrote there; nothing if there was none."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return {str(name): str(digest) for name, digest in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _is_not_ours(folder: Path, name: str, digest: str | None) -> bool:
    """Tell whether a file was not written by the last export, as far as it can be known.

    Whoever made the folder may have put links into it, and other folders' files into its marker.
    """
    file = folder / name
    try:
        if str(file.resolve()) != f"{folder.resolve()}/{name}":
            return True
    except (OSError, RuntimeError, ValueError):  # links in a circle; no name of a file
        return True
    return file.exists() and _digest(file) != digest


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def next_commands(made: Export, spec: StackSpec, folder: Path) -> list[str]:
    """Return the commands to type next, in this order."""
    kubectl = f"kubectl -n {made.namespace}"
    there, vendors = shlex.quote(str(folder)), list(made.pods)
    vendor = vendors[0] if len(vendors) == 1 else "VENDOR"
    engines = [name for name in made.pods[vendors[0]] if name not in ("redis", "router")]
    patience = f"{made.ready_s:g}s"
    return [
        f"kubectl apply -f {there}/base/namespace.yaml",
        f"{kubectl} create secret generic {SECRET}"
        + "".join(f" {_secret_option(name, spec)}" for name in _given(made, spec)),
        f"kubectl apply -k {there}/overlays/{vendor}",
        *(f"{kubectl} {waiting} --timeout={patience}" for waiting in _waits(made, engines)),
        f"deploy check --kubernetes {there}/check/{vendor}",
        f"deploy status --kubernetes --namespace {made.namespace}",
        f"{kubectl} port-forward service/{workload('router')} 8000:8000",
    ]


def _waits(made: Export, engines: list[str]) -> list[str]:
    if made.flavour == PLAIN:
        return [f"rollout status statefulset/{name}" for name in engines]
    roles = f"app.kubernetes.io/component in ({','.join(engines)})"
    return [f"wait pod --for=condition=Ready -l '{roles}'"]


def _given(made: Export, spec: StackSpec) -> tuple[str, ...]:
    """Return the keys of the Secret: those that pods need, and the hub's token if there is one."""
    return (*made.secrets, *([HUB_TOKEN] if spec.hf_token_file else []))


def _secret_option(name: str, spec: StackSpec) -> str:
    """Return the part of kubectl's command that supplies one secret: a file, or a new one.

    A new one comes through a pipe of the shell: users of the machine see the arguments of commands.
    """
    files = {
        API_KEY: spec.api_key_file,
        REDIS_URL: spec.redis.url_file,
        HUB_TOKEN: spec.hf_token_file,
        **{file.name: file for file in spec.redis.tls_files},
    }
    if file := files.get(name):
        return f"--from-file={name}={shlex.quote(str(file))}"
    return f"--from-file={name}=<(openssl rand -hex 32 | tr -d '\\n')"
