"""Run the unit tests in every disguise at the same time: python -m tests.hosts [NAME …] [-- …].

With --dealt, a file that does not look at the machine runs in one disguise alone. What stands
behind `--` is given to pytest, with the tests to run where it names none. JUnit's files and what
failed are in the run's results, in a folder for each disguise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.dealt import UNIT, left_to_others, this_commit, unit_files
from tests.hosts.disguises import DISGUISES
from tests.hosts.dress import RESULTS
from tests.hosts.host import REPO
from tests.report.results import FAILED, results_folder

# One with a single core takes as long as it keeps that core busy: others leave it to that one.
OF_SEVERAL_CORES = ("nice", "-n", "10")
NAMESPACES = ("unshare", "--mount", "--net", "--propagation", "private")
TOOLS = ("unshare", "mount", "localedef")
WORN = "tests/hosts"
SUITE = (UNIT, WORN)
DEALT = "--dealt"


def main(arguments: list[str]) -> int:
    """Return the exit code: that of the first disguise in which something failed."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, options = arguments[:at], arguments[at + 1 :]
    names = [name for name in chosen if name != DEALT] or list(DISGUISES)
    if problem := _problem(names):
        print(f"error: {problem}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="host-") as folder:
        began = time.monotonic()
        commit = this_commit() if DEALT in chosen else None
        started = {
            name: _start(name, Path(folder), [*options, *_ignored(name, commit)]) for name in names
        }
        codes = [_finish(name, process, Path(folder), began) for name, process in started.items()]
    return next(filter(None, codes), 0)


def _problem(names: list[str]) -> str:
    if unknown := sorted(set(names) - set(DISGUISES)):
        return f"no such disguise: {', '.join(unknown)}; there are {', '.join(DISGUISES)}"
    if os.getuid() != 0:
        return "disguises are namespaces and bind mounts, which only root can make: run as root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (packages util-linux and libc-bin)"
    if REPO.stat().st_mode & 0o005 != 0o005:
        return f"{REPO} is not readable by others, as which tests run: chmod -R o+rX {REPO}"
    if not Path("/usr/share/i18n/locales/de_DE").exists():
        return "no sources of locales: apt-get install locales"
    return ""


def _start(name: str, folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
    scratch = folder / name
    scratch.mkdir()
    folder.chmod(0o755)
    first = () if DISGUISES[name].shows.one_core_usable else OF_SEVERAL_CORES
    command = (*first, *NAMESPACES, sys.executable, "-m", "tests.hosts.dress", name, str(scratch))
    step = (sys.executable, "-m", "tests.report", "step", str(time.monotonic()), *_tests(options))
    tests = (*step, "-p", "no:cacheprovider", *options)
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen((*command, *tests), cwd=REPO, stdout=log, stderr=subprocess.STDOUT)


def _tests(options: list[str]) -> tuple[str, ...]:
    """Return what to run: all, or with the tests that are named those of the disguise itself."""
    return (WORN,) if any(option.startswith("tests/") for option in options) else SUITE


def _ignored(name: str, commit: str | None) -> list[str]:
    """Return the options that leave files to the other disguises; none without a commit."""
    if commit is None:
        return []
    return [f"--ignore={file}" for file in left_to_others(name, commit, unit_files())]


def _finish(name: str, process: subprocess.Popen[bytes], folder: Path, began: float) -> int:
    code = process.wait()
    _keep_results(name, folder / name / RESULTS)
    print(f"-- {name}", flush=True)
    sys.stdout.buffer.write((folder / f"{name}.log").read_bytes())
    print(f"-- {name}: exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def _keep_results(name: str, found: Path) -> None:
    """Copy a disguise's results to those of the run; it could not write there itself."""
    if not found.exists():
        return
    shutil.copytree(found, results_folder() / name, dirs_exist_ok=True)
    failed = found / FAILED
    if failed.exists():
        with (results_folder() / FAILED).open("a") as file:
            file.writelines(f"{line} ({name})\n" for line in failed.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
