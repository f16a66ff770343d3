"""Where the kit keeps what it must remember: state by stack, and caches."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.home_folder import expanded

if TYPE_CHECKING:
    from deploy.doctor.observed import HostSeen

# Not TMPDIR, which may differ between the shell that starts a stack and the one that stops it.
_TEMP = Path("/tmp")  # noqa: S108 - what is made there is made private before it is used
# How many names are tried for a stack's folder, in case other users took some.
_TEMP_NAMES = 10


def is_private(folder: Path) -> bool:
    """Whether this is a private folder of this user, and not a link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, with any umask."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def replace_private(path: Path, text: str) -> None:
    """Replace such a file in one step, so that a crash leaves the old or the new one."""
    new = path.with_suffix(".tmp")
    write_private(new, text)
    new.replace(path)


@dataclass(frozen=True)
class StackHome:
    """The folders and files of one stack.

    Everything is below `root`, except `temp_dir`: it holds Unix sockets, whose paths are limited to
    about 100 characters, too few for a long home folder.
    """

    root: Path

    @property
    def state_file(self) -> Path:
        """The plan that was started, its history, and the services' records."""
        return self.root / "state.json"

    @property
    def events_file(self) -> Path:
        """What happened to services since: one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def drain_file(self) -> Path:
        """The names of drained engines, which the router reads."""
        return self.run_dir / "router" / "drained"

    @property
    def supervisor_socket(self) -> Path:
        """The socket on which the supervisor listens while it runs."""
        return self.temp_dir / "supervisor.sock"

    @property
    def secrets_dir(self) -> Path:
        """One file for each secret, which only this user may read."""
        return self.root / "secrets"

    @property
    def run_dir(self) -> Path:
        """The configuration files of services."""
        return self.root / "run"

    @property
    def logs_dir(self) -> Path:
        """One log for each service."""
        return self.root / "logs"

    @property
    def temp_dir(self) -> Path:
        """The stack's folder for sockets: ours if it exists, else the first name that is free."""
        digest = hashlib.sha256(str(self.root).encode()).hexdigest()[:10]
        first = _TEMP / f"pdkit-{digest}"
        folders = (first, *(_TEMP / f"{first.name}-{n}" for n in range(1, _TEMP_NAMES)))
        ours = next(filter(is_private, folders), None)
        return ours or next((f for f in folders if not os.path.lexists(f)), first)


@dataclass(frozen=True)
class Home:
    """The kit's folders: `PDKIT_HOME`, else the XDG state and cache folders.

    Attributes:
        host: what the kernel says of this machine; it is looked at if None.
    """

    state: Path
    cache: Path
    stack_folder: Path | None = None
    host: HostSeen | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Home:
        """Return the home that the environment names. It need not exist."""
        if environ.get("PDKIT_HOME"):
            base = expanded(environ["PDKIT_HOME"]).absolute()
            return cls(base, base / "cache")
        state = Path(environ.get("XDG_STATE_HOME") or expanded("~/.local/state"))
        cache = Path(environ.get("XDG_CACHE_HOME") or expanded("~/.cache"))
        return cls(state.absolute() / "pdkit", cache.absolute() / "pdkit")

    @property
    def models(self) -> Path:
        """The folder of tiny models."""
        return self.cache / "models"

    def engine_cache(self, image: str) -> Path:
        """Return the folder of what engines of one image keep between starts."""
        return self.cache / "engines" / hashlib.sha256(image.encode()).hexdigest()[:16]

    def with_stacks_in(self, folder: Path) -> Home:
        """Return the same home with any stack's files in one folder, as `render -o` writes them."""
        return replace(self, stack_folder=folder.absolute())

    def stack(self, name: str) -> StackHome:
        """Return the folders of a stack, whether or not it exists."""
        return StackHome(self.stack_folder or self.state / "stacks" / name)

    def lock_file(self, name: str) -> Path:
        """Return the file that a command locks while it changes a stack."""
        return self.state / "locks" / f"{name}.lock"

    def canaries_file(self, name: str) -> Path:
        """Return the record of the prompts whose KV a stack's checks left in its store.

        Not in the stack's folder, since KV in the user's own Redis outlives `down`.
        """
        return self.state / "canaries" / f"{name}.json"

    @property
    def bench_lock_file(self) -> Path:
        """Locked while a benchmark runs: each would slow down the other."""
        return self.state / "bench.lock"

    @property
    def bench(self) -> Path:
        """The folder of benchmark results."""
        return self.state / "bench"

    @property
    def measured_file(self) -> Path:
        """What benchmarks measured last, by model and machine."""
        return self.bench / "measured.json"

    @property
    def planning_lock_file(self) -> Path:
        """Locked from planning to writing the state, so that no two stacks get the same GPUs."""
        return self.state / "planning.lock"

    def stacks_beside(self, name: str) -> tuple[str, ...]:
        """Return the names of all other stacks that have state."""
        return tuple(other for other in self.stacks() if other != name)

    def stacks(self) -> tuple[str, ...]:
        """Return the names of all stacks that have state."""
        return tuple(sorted(file.parent.name for file in self.state.glob("stacks/*/state.json")))
