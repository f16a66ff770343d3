"""Run the parts of scripts/test, which has installed what they need.

python -m tests.run INSTALLED_S [full | PART ...]

Without a name: what every change must pass. `full` runs every part and writes the result to
docs/results/tested.md. It skips the parts that have passed with the files of now, so that a run
that was interrupted goes on where it ended; test-results/passed.json knows them.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from deploy.runtime.host import available_memory_mib, machine_memory_mib, text_of
from deploy.runtime.observe.host import see_host
from tests.hosts.disguises import DISGUISES

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "test-results"
TESTED = "docs/results/tested.md"
_BEGIN, _END = "<!-- written by scripts/test full -->\n", "<!-- end -->\n"
_CPUS = len(os.sched_getaffinity(0))
# Three stacks of two engines, of up to 3 GiB each.
_MEMORY_OF_THREE_STACKS_MIB = 20 * 1024
# Beside the other parts, on what they leave of the cores.
_NICE = ("nice", "-n", "15")
_LONGEST_E2E = ("docker", "one_stack", "test_diagnosis", "test_fixes_in_engines", "test_redis_path")
_RECORDING = threading.Lock()
_LEVELS = {"AVX2": "avx2", "AVX-512": "avx512f", "AMX": "amx_tile"}


@dataclass(frozen=True)
class Part:
    """Commands that run in turn; `name` names it on the command line and in the results."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    nice: bool = False


def _tool(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(Path(sys.executable).with_name(name)), *arguments)


def _tests(name: str, *options: str, nice: bool = False) -> Part:
    junit = f"--junitxml=test-results/{name}.xml"
    return Part(name, ((sys.executable, "-m", "pytest", "-q", junit, *options),), nice)


def _e2e_parts() -> list[Part]:
    """Return a part for each file or folder that has a stack of its own, the longest first."""
    folder = REPO / "tests" / "e2e"
    found = [*folder.glob("test_*.py"), *(path.parent for path in folder.glob("*/__init__.py"))]
    names = sorted(path.stem for path in found)
    names.sort(key=lambda name: name not in _LONGEST_E2E)
    paths = {path.stem: str(path.relative_to(REPO)) for path in found}
    return [
        _tests(f"e2e-{name.removeprefix('test_').replace('_', '-')}", paths[name], "--durations=10")
        for name in names
    ]


# Half of what these tests do is waiting, so there is one worker more than processors.
_WORKERS = ("-n", str(_CPUS + 1), "--dist", "loadfile")
_LINT = Part(
    "lint",
    (
        _tool("ruff", "check"),
        _tool("ruff", "format", "--check"),
        ("env", "PYTHONPATH=deploy/connector:deploy/router", *_tool("lint-imports", "--no-logo")),
        _tool("zizmor", "--offline", "--quiet", ".github"),
    ),
)
_CONNECTOR_TYPES = (
    "env", "--chdir=deploy/connector",
    *_tool("mypy", "--config-file", "../../pyproject.toml", "-p", "pdkit_connector"),
)  # fmt: skip
_TYPES = Part("types", (_tool("mypy"), _CONNECTOR_TYPES), nice=True)
# Fails on a link or an anchor that leads nowhere.
_DOCS = Part(
    "docs",
    (("env", "NO_MKDOCS_2_WARNING=1", *_tool("mkdocs", "build", "--strict")),),
    nice=True,
)
_UNIT = _tests("unit", "tests/unit", "-m", "not full", *_WORKERS)
# The file with the heaviest imports comes first.
_CONNECTOR = _tests("connector", "tests/connector", *_WORKERS, "--no-loadscope-reorder")
_PROCESSES = _tests("processes", "tests/e2e/one_stack", "-m", "quick", "--durations=10")
_CONTAINERS = _tests("containers", "tests/e2e/docker", "-m", "quick", "--durations=10")
_SMALL, _LARGE = ((sys.executable, "-m", "tests.hosts", name, "-n", "3") for name in DISGUISES)
# The one with a single core takes as long as it keeps that core busy: the other leaves it to it.
_HOSTS = [Part("host-small", (_SMALL,)), Part("host-large", (("nice", "-n", "10", *_LARGE),))]
# Each fix on each LMCache, in forks of one process.
_VERSIONS = _tests("versions", "tests/versions")
_FUZZ = _tests("fuzz", "tests/fuzz", nice=True)
# What images are built from, compared with the package index.
_IMAGES = _tests("images", "tests/images", nice=True)
# The Python code of the CUDA wheels, on emulated GPUs.
_GPU = _tests("gpu", "tests/gpu", nice=True)

# Groups run in turn, the parts of one at the same time; nice parts run beside all of them.
EVERY_CHANGE = [[_LINT, _TYPES, _DOCS], [_UNIT], [_CONNECTOR], [_PROCESSES, _CONTAINERS]]
# `unit`, `processes` and `containers` are in it, too: each disguised machine runs every unit test,
# and the end-to-end parts run all tests of their stacks.
FULL = [
    [_LINT, _TYPES, _DOCS, _GPU, _FUZZ, _IMAGES],
    _HOSTS, [_CONNECTOR], [_VERSIONS], _e2e_parts(),
]  # fmt: skip
PARTS = {part.name: part for group in (*EVERY_CHANGE, *FULL) for part in group}


@dataclass(frozen=True)
class Ended:
    """A part that ran: the second of the run in which it began, how long it took, and its code."""

    name: str
    began_s: float
    seconds: float
    code: int

    def __str__(self) -> str:
        outcome = " failed" if self.code else ""
        return f"{self.name:<24}{self.seconds:>6.0f} s, from {self.began_s:.0f} s{outcome}"


@dataclass
class Run:
    """One run of parts.

    Attributes:
        began_s: when it began, on the monotonic clock.
        full: whether it goes on after a part that failed.
        files: the hash of the files that it tests; "" where nothing is to be recorded.
    """

    began_s: float = field(default_factory=time.monotonic)
    full: bool = False
    files: str = ""
    ended: list[Ended] = field(default_factory=list)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _stopped: bool = False

    @property
    def failed(self) -> list[str]:
        return [part.name for part in self.ended if part.code]

    def groups(self, groups: Sequence[Sequence[Part]]) -> None:
        """Run the groups in turn, and beside them their nice parts, one by one.

        Raises:
            KeyboardInterrupt: somebody stopped the run; its parts have ended.
        """
        nice = [part for group in groups for part in group if part.nice]
        stacks = 3 if machine_memory_mib() > _MEMORY_OF_THREE_STACKS_MIB else 2
        with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(stacks) as pool:
            try:
                lane = beside.submit(lambda: [self._part(part) for part in nice])
                for group in groups:
                    list(pool.map(self._part, [part for part in group if not part.nice]))
                lane.result()
            except KeyboardInterrupt:
                self._stop()
                raise

    def _part(self, part: Part) -> None:
        if self._stopped or (self.failed and not self.full):
            return
        began, code, log = time.monotonic(), 0, RESULTS / f"{part.name}.log"
        with log.open("wb") as output:
            for command in part.commands:
                code = code or self._code((*_NICE, *command) if part.nice else command, output)
        ended = Ended(part.name, began - self.began_s, time.monotonic() - began, code)
        self.ended.append(ended)
        if self.files and not code:
            record_passed(self.files, ended)
        text = log.read_text(errors="replace").rstrip()
        print(f"== {ended}\n{text if code else text.rpartition(chr(10))[2]}\n", flush=True)

    def _code(self, command: tuple[str, ...], output: BinaryIO) -> int:
        # In a process group of its own, so that it gets one interrupt, which is ours.
        process = subprocess.Popen(
            command, cwd=REPO, process_group=0, stdout=output, stderr=subprocess.STDOUT
        )
        self._running.add(process)
        if self._stopped:
            self._stop()
        code = process.wait()
        self._running.discard(process)
        return code

    def _stop(self) -> None:
        """Interrupt what runs, as Ctrl-C does: tests then take their stacks down."""
        self._stopped = True
        for process in list(self._running):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)


def main(installed_s: str, *names: str) -> int:
    if unknown := sorted(set(names) - PARTS.keys() - {"full"}):
        print(f"error: no such part: {', '.join(unknown)}", file=sys.stderr)
        print(f"try: scripts/test PART, one of {', '.join(PARTS)}", file=sys.stderr)
        return 3
    full = "full" in names
    groups = FULL if full else _chosen({*names}) if names else EVERY_CHANGE
    RESULTS.mkdir(exist_ok=True)
    shutil.rmtree(RESULTS / "logs", ignore_errors=True)
    run = Run(time.monotonic() - float(installed_s), full, files_of_now())
    known = parts_passed(run.files) if full else {}
    run.ended.append(Ended("install", 0, float(installed_s), 0))
    # Also what a shell starts in the background, and so without SIGINT, gets it from us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        # Shared by the end-to-end parts: what takes long to look up of the engines.
        with TemporaryDirectory(prefix="pdkit-kept-") as kept:
            os.environ["PDKIT_TEST_KEPT"] = kept
            run.groups([[part for part in group if part.name not in known] for group in groups])
        problem = ", ".join(run.failed) and f"{', '.join(run.failed)} failed"
    except KeyboardInterrupt:
        problem = "stopped before its end"
    else:
        if full:
            write_tested(run, known, REPO / TESTED)
    last = f"error: {problem}; results: {RESULTS}" if problem else "all passed"
    print("\n".join((*summary(run, known), last)))
    return 1 if problem else 0


def _chosen(names: set[str]) -> list[list[Part]]:
    """Return the parts of these names in the groups that they have in a whole run."""
    groups, left = [], set(names)
    for group in (*EVERY_CHANGE, *FULL):
        groups.append([PARTS[part.name] for part in group if part.name in left])
        left -= {part.name for part in group}
    return groups


def files_of_now(root: Path = REPO) -> str:
    """Return a hash of the files that git has or would take; "" where there is no git.

    The page of results is left out: a run that passes writes it.
    """
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if not listed:
        return ""
    found = hashlib.sha256()
    for name in sorted({name for name in listed.split("\0") if name}):
        file = root / name
        if file.is_file() and name != TESTED:
            found.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def _git(root: Path, *arguments: str) -> str:
    """Return what git answers; "" where it is missing, or this is not a checkout of this user."""
    if shutil.which("git") is None:
        return ""
    command = ("git", "-C", str(root), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def parts_passed(files: str) -> dict[str, float]:
    """Return the parts that passed with these files, and the seconds that each took."""
    record = RESULTS / "passed.json"
    found = json.loads(record.read_text()) if files and record.exists() else {}
    return dict(found["seconds"]) if found.get("files") == files else {}


def record_passed(files: str, part: Ended) -> None:
    with _RECORDING:
        seconds = {**parts_passed(files), part.name: round(part.seconds)}
        (RESULTS / "passed.json").write_text(json.dumps({"files": files, "seconds": seconds}))


def summary(run: Run, known: Mapping[str, float]) -> list[str]:
    """Return what a run ends with, but for its last line."""
    by_start = sorted(run.ended, key=lambda part: part.began_s)
    return [
        *map(str, by_start),
        *(f"{name:<24}{known[name]:>6.0f} s, in an earlier run with these files" for name in known),
        f"in all {time.monotonic() - run.began_s:.0f} s; {machine()}",
    ]


def write_tested(run: Run, known: Mapping[str, float], page: Path) -> None:
    """Write the result of a full run into the page of results."""
    commit = _git(REPO, "describe", "--always", "--dirty", "--abbrev=12").strip() or "unknown"
    rows = [(part.name, part.seconds, "failed" if part.code else "passed") for part in run.ended]
    rows += [(name, seconds, "passed") for name, seconds in known.items()]
    text = "\n".join(
        (
            f"Commit {commit.replace('-dirty', ' with changes')}, "
            f"{datetime.date.today():%-d %B %Y}. {machine()}.\n",
            "| part | result | time |\n|---|---|---|",
            *(f"| {name} | {result} | {seconds:.0f} s |" for name, seconds, result in sorted(rows)),
            "",
        )
    )
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    page.write_text(f"{before}{_BEGIN}{text}{_END}{after}", encoding="utf-8")


def machine(root: Path = Path("/")) -> str:
    """Return processor, instruction sets, cores, memory, load and versions in one line."""
    seen = see_host(root)
    model = re.search(r"^model name\s*:\s*(.+)$", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    levels = [level for level, flag in _LEVELS.items() if flag in seen.cpu_flags]
    facts = (
        model[1].strip() if model else platform.machine(),
        " ".join(levels) or "no AVX2",
        f"{seen.cpus} of {os.cpu_count()} cores",
        f"{machine_memory_mib() / 1024:.1f} GiB, {available_memory_mib() / 1024:.1f} free",
        f"load {' '.join(text_of(root / 'proc/loadavg').split()[:3])}",
        f"Linux {platform.release()}",
        f"Debian {text_of(root / 'etc/debian_version').strip() or 'no'}",
        f"Python {platform.python_version()}",
    )
    return ", ".join(facts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
