"""Give the engines a Python of their own, from a folder of wheels. Standard library only.

The machine's Python brings torch and what else it has; wheels add to it and win. Nothing of the
machine's Python is changed, and nothing is asked of a network.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from bench.gpu_proof.results import ROOT

_INSTALL_S = 460
# What must be importable before anything is started, and the wheel that brings it.
NEEDED = {
    "torch": "torch", "vllm": "vllm", "lmcache": "lmcache", "httptools": "httptools",
    "uvloop": "uvloop", "xxhash": "xxhash", "redis": "redis",
    "filelock": "filelock", "httpx": "httpx", "httpcore": "httpcore", "packaging": "packaging",
    "psutil": "psutil", "pydantic": "pydantic", "yaml": "pyyaml", "typer": "typer",
    "prometheus_client": "prometheus-client", "typing_extensions": "typing-extensions",
    "huggingface_hub": "huggingface-hub",
}  # fmt: skip
_MISSING = (
    "import importlib.util, sys; "
    "print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
)
_SITES = "import site; print(*site.getsitepackages(), sep='\\n')"


class InstallFailed(Exception):
    """The engines cannot be installed; the text says why, and what to do."""


def engines_python(state: Path, wheels: Path | None, named: Path | None, *, cpu: bool) -> Path:
    """Return the Python that has engines and kit, installing them where wheels are given.

    Raises:
        InstallFailed: there is none, or it lacks something.
    """
    python = named or (ROOT / ".venv/bin/python" if cpu else state / "engines/bin/python")
    if wheels and not named and not cpu:
        install(python.parent.parent, wheels, sys.executable)
    if not python.is_file():
        raise InstallFailed(
            f"there is no {python}; try: "
            + ("scripts/install" if cpu else "--wheels FOLDER, or --python PYTHON that has vLLM")
        )
    require(python)
    return python


def install(venv: Path, wheels: Path, machine: str) -> None:
    """Make an environment beside the machine's Python, where it is not of these wheels already.

    Raises:
        InstallFailed: it cannot be made.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise InstallFailed(f"--wheels: {wheels} holds no wheels (docs/how-to/rented-gpu.md)")
    listing = "".join(f"{file.name} {file.stat().st_size}\n" for file in files) + machine
    stamp, wanted = venv / ".installed", hashlib.sha256(listing.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(venv, ignore_errors=True)
    _run(machine, "-m", "venv", "--without-pip", str(venv))
    python = venv / "bin/python"
    sites = _run(machine, "-c", _SITES).split()
    (own,) = _run(str(python), "-c", _SITES).split()[:1]
    lines = "".join(f"import site; site.addsitedir({site!r})\n" for site in sites)
    (Path(own) / "of-the-machine.pth").write_text(lines, encoding="utf-8")
    _run(
        machine, "-m", "pip", "--python", str(python), "install", "--quiet",
        "--disable-pip-version-check", "--no-index", "--no-deps", "--ignore-installed",
        *(str(file) for file in files),
    )  # fmt: skip
    stamp.write_text(wanted, encoding="utf-8")


def require(python: Path) -> None:
    """Check that a Python has all that a stack is started with.

    Raises:
        InstallFailed: naming the wheels that it lacks.
    """
    missing = _run(str(python), "-c", _MISSING, *NEEDED).split()
    if missing:
        wheels = " ".join(sorted({NEEDED[name] for name in missing}))
        raise InstallFailed(f"{python} lacks {wheels}; try: put their wheels into --wheels FOLDER")


def _run(*argv: str) -> str:
    try:
        ran = subprocess.run(
            argv, capture_output=True, text=True, timeout=_INSTALL_S, check=False, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise InstallFailed(f"{argv[0]}: {exc}") from exc
    if ran.returncode:
        said = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-3:]
        raise InstallFailed(f"{' '.join(argv[:6])} failed: {' / '.join(said)}")
    return ran.stdout
