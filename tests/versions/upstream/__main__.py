"""Run LMCache's own tests on each pinned release, untouched and with the fixes, and compare.

Usage: python -m tests.versions.upstream [--versions V,V] [--quick] [--server] [--fresh] [--json]
    [--output F]

Writes docs/results/upstream-tests.md (for all releases only), or with `--server`
upstream-server-tests.md, and with `--json` all outcomes to stdout. Outcomes are kept between runs
as long as nothing changed that they rest on, so that a run that was stopped goes on; `--fresh`
keeps to none of them. Nothing of LMCache's sources is kept. Some tests take up to 10 GB of memory.
Exit code 1 where a test passed untouched and does not with the fixes, unless explanations.py says
why that is right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from tests.conftest import REPO
from tests.versions.installed import VERSIONS, pinned
from tests.versions.upstream.report import Change, Compared, as_json, as_markdown
from tests.versions.upstream.sdist import HERE, REQUIREMENTS, NoTests, pins, unpack_tests
from tests.versions.upstream.side import SERVER_RELEASES, Run, Side
from tests.wheels import cache_folder

CONNECTOR = REPO / "deploy" / "connector"
_CACHES = shutil.ignore_patterns("__pycache__", ".*")
DOCUMENT = REPO / "docs" / "results" / "upstream-tests.md"
SERVER_DOCUMENT = DOCUMENT.with_name("upstream-server-tests.md")
QUICK = (
    "tests/test_utils.py",
    "tests/v1/test_config.py",
    "tests/v1/test_decode_save_and_preemption.py",
    "tests/v1/test_remote_metadata.py",
    "tests/v1/test_remote_mla_worker_id_as0.py",
    "tests/v1/test_v1_adapter_request_finished_scheduler_role.py",
    "tests/v1/test_v1_adapter_state_desync.py",
    "tests/v1/test_vllm_layerwise_wait_for_save.py",
    "tests/v1/test_vllm_sync_load_pin_cleanup.py",
)
SLOW = (
    "tests/v1/test_retrieve_pin_ownership.py",
    "tests/v1/test_connector.py",
    "tests/v1/test_freeze_mode_integration.py",
    "tests/v1/test_health_monitor.py",
    "tests/v1/storage_backend/test_storage_manager.py",
)
# Of LMCache's server and of engines that use it. Left out are stores other than memory and
# plug-ins, devices other than CPUs, engines other than vLLM, and test_mq.py, whose outcomes differ
# from run to run: it gives processes that it starts a few seconds for their imports.
SERVER = (
    "tests/v1/distributed/test_distributed_storage_manager.py",
    "tests/v1/distributed/test_fault_inject_l2_adapter.py",
    "tests/v1/distributed/test_l1_*.py",
    "tests/v1/distributed/test_l2_adapter_*.py",
    "tests/v1/distributed/test_lru_eviction_policy.py",
    "tests/v1/distributed/test_mock_l2_adapter.py",
    "tests/v1/distributed/test_multi_l1*.py",
    "tests/v1/distributed/test_prefetch_*.py",
    "tests/v1/distributed/test_report_status.py",
    "tests/v1/distributed/test_storage_*.py",
    "tests/v1/distributed/test_store_*.py",
    "tests/v1/multiprocess/http_apis/test_*.py",
    "tests/v1/multiprocess/test_[ace-ln-z]*.py",
    "tests/v1/multiprocess/test_mp_*.py",
    "tests/v1/multiprocess/test_mq_handler_helpers.py",
    "tests/v1/multiprocess/test_batched_iteration_with_skip.py",
    "tests/v1/platform/devices/cpu/test_*.py",
    "tests/v1/test_mp_connector_*.py",
    "tests/v1/test_mp_nonblocking_lookup.py",
    "tests/v1/test_mp_server_autostart.py",
    "tests/v1/test_mp_tracker_*.py",
    "tests/v1/test_vllm_mp_adapter.py",
)
FILES = QUICK + SLOW


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    versions: tuple[str, ...]
    files: tuple[str, ...]
    file_seconds: int
    json: bool
    fresh: bool
    output: Path | None
    connector: Path
    repeats: int


def main() -> int:
    """Run, report, and return the exit code."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="upstream-fixes-") as name:
        # One state of the fixes for all releases, whatever is edited meanwhile.
        fixes = Path(shutil.copytree(options.connector, Path(name) / "connector", ignore=_CACHES))
        options = replace(options, connector=fixes)
        compared = [_compare(version, options) for version in options.versions]
        notes = _notes(options)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(as_markdown(compared, notes), encoding="utf-8")
        _say("report", str(options.output))
    if options.json:
        print(json.dumps(as_json(compared), indent=1))
    bad = [(each.version, change) for each in compared for change in each.changes if change.bad]
    for version, change in bad:
        _say(version, f"BROKEN {change.test}: {change.before} -> {change.after} {change.why}")
    return 1 if bad else 0


def _options() -> Options:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--versions", default=",".join(VERSIONS), help="comma-separated")
    parser.add_argument("--files", default=",".join(FILES), help="test files of the sdist")
    parser.add_argument("--quick", action="store_true", help="leave out the files of minutes")
    parser.add_argument("--server", action="store_true", help="only tests of LMCache's server")
    parser.add_argument("--file-seconds", type=int, default=600, help="limit of one test file")
    parser.add_argument("--json", action="store_true", help="print every outcome")
    parser.add_argument("--fresh", action="store_true", help="run all, keep to no old outcome")
    parser.add_argument("--connector", type=Path, default=CONNECTOR, help="where the fixes are")
    parser.add_argument(
        "--repeats", type=int, default=2, help="further runs of a test whose outcome changed"
    )
    parser.add_argument("--output", type=Path, help=f"default for all releases: {DOCUMENT.name}")
    given = parser.parse_args()
    versions = tuple(given.versions.split(","))
    files = QUICK if given.quick else tuple(given.files.split(","))
    if given.server:
        versions, files = SERVER_RELEASES, SERVER
    if unknown := set(versions) - set(VERSIONS):
        parser.error(f"not in wheels.txt: {', '.join(sorted(unknown))}")
    whole = (versions, files) == (VERSIONS, FILES)
    whole_page = SERVER_DOCUMENT if given.server else DOCUMENT if whole else None
    output = given.output or whole_page
    return Options(
        versions,
        files,
        given.file_seconds,
        given.json,
        given.fresh,
        output,
        given.connector,
        given.repeats,
    )


def _compare(version: str, options: Options) -> Compared:
    """Run both sides of one release, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="upstream-") as name:
        try:
            unpack_tests(version, Path(name))
            return _compare_in(Path(name), version, options)
        except NoTests as exc:
            _say(version, str(exc))
            return Compared(version, why_not=str(exc))


def _compare_in(folder: Path, version: str, options: Options) -> Compared:
    files = _files(folder, options.files)
    if not files:
        raise NoTests("its sdist holds none of the chosen tests")

    def run(fixes: Path | None, targets: list[str]) -> Side:
        return Run(version, folder, fixes, options.file_seconds).tests(targets)

    def kept(name: str, fixes: Path | None) -> Side:
        path = _kept_path(version, fixes)
        known = Side()
        if path.exists() and not options.fresh:
            known = Side.from_dict(json.loads(path.read_text(encoding="utf-8")))
        if missing := [file for file in files if file not in known.files]:
            known.add(_timed(version, name, lambda: run(fixes, missing)))
            path.write_text(json.dumps(known.as_dict()), encoding="utf-8")
        return known.only(files)

    before, after = kept("untouched", None), kept("fixed", options.connector)
    changes = _changes(before, after)
    if again := [change.test for change in changes if "::" in change.test]:
        times = options.repeats
        _say(version, f"{len(changes)} outcomes changed: runs those tests {times} more times")
        repeats = [(run(None, again), run(options.connector, again)) for _ in range(times)]
        changes = [change.repeated(repeats) for change in changes]
    return Compared(version, files, before, after, changes)


def _files(folder: Path, chosen: Sequence[str]) -> list[str]:
    """Return the files of a release that patterns choose."""
    found = (file for pattern in chosen for file in sorted(folder.glob(pattern)))
    return [str(file.relative_to(folder)) for file in found]


def _kept_path(version: str, fixes: Path | None) -> Path:
    """Return where a side's outcomes are kept: other pins, tools or fixes, another path."""
    lock = (REPO / "images" / "cpu" / "requirements.lock").read_bytes()
    digest = sha256(f"{pins()[version]}\n{pinned()[version]}".encode())
    plugins = [path.read_bytes() for path in sorted(HERE.glob("pdkit_upstream_*.py"))]
    for content in (lock, REQUIREMENTS.read_bytes(), *plugins):
        digest.update(content)
    for path in sorted(fixes.rglob("*.py")) if fixes else ():
        digest.update(str(path.relative_to(fixes or path)).encode() + path.read_bytes())
    return cache_folder() / "upstream" / f"{version}-{digest.hexdigest()[:12]}.json"


def _notes(options: Options) -> list[str]:
    """Return which state of the fixes was tested, and what was left out."""
    digest = sha256()
    for path in sorted(options.connector.rglob("*.py")):
        digest.update(str(path.relative_to(options.connector)).encode() + path.read_bytes())
    notes = [
        f"Digest of the fixes' source: `{digest.hexdigest()[:12]}`. Further runs of tests whose "
        f"outcome differs: {options.repeats}."
    ]
    if options.files == SERVER:
        notes.append(
            "These are the tests of LMCache's server and of the engines that use it. On the fixed "
            "side they run with what the kit adds to both, except that the server keeps its ports. "
            "Files that skip themselves without a GPU run, too: most of their tests use none."
        )
        return notes
    for what, every, chosen in (
        ("files", FILES, options.files),
        ("releases", VERSIONS, options.versions),
    ):
        if left_out := [f"`{each}`" for each in every if each not in chosen]:
            notes.append(f"Not run this time, {what}: {', '.join(left_out)}.")
    return notes


def _changes(before: Side, after: Side) -> list[Change]:
    tests = [*before.ends, *(test for test in after.ends if test not in before.ends)]
    changes = [Change.of(test, before.ends.get(test), after.ends.get(test)) for test in tests]
    return [change for change in changes if change.before != change.after]


def _timed(version: str, name: str, work: Callable[[], Side]) -> Side:
    began = time.monotonic()
    side = work()
    good, bad = side.count("passed", "xpassed"), side.count("failed", "hung", "crashed", "not run")
    rest = len(side.ends) - good - bad
    counts = f"{good} passed, {bad} failed, {rest} skipped"
    _say(version, f"{name}: {counts} ({time.monotonic() - began:.0f} s)")
    return side


def _say(version: str, text: str) -> None:
    print(f"{version:12} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
