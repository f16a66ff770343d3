"""Run the unit tests on a simulated machine: python -m tests.hosts NAME [pytest's options].

The options may name tests; otherwise all unit tests run. Its own tests run in any case.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hosts.disguises import DISGUISES
from tests.hosts.host import REPO

NAMESPACES = ("unshare", "--mount", "--net", "--propagation", "private")
TOOLS = ("unshare", "mount", "localedef")
# Without a cache: one of the two users may not write into the checkout.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--dist", "loadfile")


def main(name: str, *options: str) -> int:
    """Return pytest's exit code; its JUnit file is kept in test-results."""
    if problem := _problem(name):
        print(f"error: {problem}", file=sys.stderr)
        return 3
    paths = [option for option in options if option.startswith("tests/")] or ["tests/unit"]
    with tempfile.TemporaryDirectory(prefix="host-") as folder:
        scratch = Path(folder) / name
        scratch.mkdir()
        scratch.parent.chmod(0o755)
        # The user on that machine may write nowhere else.
        junit, kept = scratch / "junit.xml", REPO / "test-results" / f"host-{name}.xml"
        dressed = (sys.executable, "-m", "tests.hosts.dress", name, str(scratch))
        tests = (*PYTEST, f"--junitxml={junit}", "tests/hosts", *paths, *options)
        code = subprocess.run((*NAMESPACES, *dressed, *tests), cwd=REPO, check=False).returncode
        if junit.exists():
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(junit, kept)
        return code


def _problem(name: str) -> str:
    if name not in DISGUISES:
        return f"no such machine: {name}; there are {', '.join(DISGUISES)}"
    if os.getuid() != 0:
        return "simulated machines are namespaces with bind mounts, made by root only: run as root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (packages util-linux and libc-bin)"
    if REPO.stat().st_mode & 0o005 != 0o005:
        return f"{REPO} is not readable by others, as which tests run: chmod -R o+rX {REPO}"
    if not Path("/usr/share/i18n/locales/de_DE").exists():
        return "no sources of locales: apt-get install locales"
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
