"""Parts of a run that prove nothing new while the files they test are those of their last pass.

passed.json, which is committed, has a hash of these files for each part. scripts/test leaves a part
out whose files have that hash; scripts/test full leaves out none. Both write down what passed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.report.results import REPO

RECORD = Path(__file__).with_name("passed.json")
# Part → its end-to-end tests. Every other part is a step of its own name.
E2E = {
    "check-power": ("tests/e2e/test_check_power.py",),
    "fixes-in-engines": ("tests/e2e/test_fixes_in_engines.py",),
    "gpu-proof": ("tests/e2e/test_gpu_proof.py",),
    "lmcache-mp": ("tests/e2e/docker/test_swap_connector.py", "tests/e2e/test_kv_server.py"),
    "podman": ("tests/e2e/test_kubernetes.py",),
    "redis-path": ("tests/e2e/test_redis_path.py",),
    "user-redis": ("tests/e2e/test_own_redis.py", "tests/e2e/test_several_hosts.py"),
}
_ENGINES = ("deploy/connector", "images/cpu/requirements.lock")
_TESTS = ("scripts/test-tools.lock", "tests/conftest.py")
# Either folder of tests uses modules of the other.
_CONNECTOR = (*_ENGINES, *_TESTS, "tests/connector", "tests/versions")
# All that a running stack is made of, and that starts, checks and stops it.
_STACK = (
    *_ENGINES, *_TESTS, "compose", "deploy/assets.py", "deploy/config", "deploy/metrics",
    "deploy/planning", "deploy/router", "deploy/runtime", "deploy/stack", "deploy/tiny_model",
    "deploy/verify", "deploy/workflows", "images",
)  # fmt: skip
# Part → the files and folders that decide whether it passes, and so do the modules of tests and
# benchmarks that they import.
PARTS = {
    # The connector with the installed LMCache.
    "connector": _CONNECTOR,
    # Fixes on each LMCache: the releases, the cells, and tests of the connector that run on each.
    "versions": (*_CONNECTOR, "docs/reference/fixes.md"),
    # vLLM's GPU code: what the kit renders, which the goldens hold, and the metrics that it reads.
    "gpu": (
        *_ENGINES, *_TESTS, "compose", "deploy/config/catalog.py", "deploy/metrics/engine.py",
        "deploy/stack/cluster/autoscaling.py", "deploy/tiny_model", "deploy/verify/hits.py",
        "deploy/workflows/bench/counters.py", "images/catalog.yaml", "tests/golden/compose",
        "tests/golden/process", "tests/gpu",
    ),
    # Pods in podman: how an export is made of a stack, what it is for CPUs, and its images. What
    # runs inside is what test_one_stack.py runs in Docker.
    "podman": (
        *_ENGINES, *_TESTS, "deploy/cli/cluster_check.py", "deploy/stack/cluster",
        "deploy/workflows/cluster_check.py", "deploy/workflows/cluster_status.py",
        "deploy/workflows/cluster_document.py", "images", "tests/golden/kubernetes",
        *E2E["podman"],
    ),
    # KV that is damaged, lost or late, each fix in an engine, the other connector, another Redis
    # and several hosts: what they share with every stack is tested by the files that always run.
    "check-power": (*_STACK, "bench/check_power", *E2E["check-power"]),
    "fixes-in-engines": (*_STACK, *E2E["fixes-in-engines"]),
    "redis-path": (*_STACK, *E2E["redis-path"]),
    "lmcache-mp": (*_STACK, "tests/fixtures/metrics", *E2E["lmcache-mp"]),
    "user-redis": (*_STACK, *E2E["user-redis"]),
    "gpu-proof": (*_STACK, "bench/gpu_proof", "scripts/gpu-proof", *E2E["gpu-proof"]),
}  # fmt: skip
_IMPORT = re.compile(r"^from ((?:tests|bench)[.\w]*) import (\([^)]*\)|.*)", re.M)


def unchanged(root: Path = REPO, record: Path = RECORD) -> frozenset[str]:
    """Return the parts whose files are those of their last pass."""
    known = _known(record)
    return frozenset(part for part in PARTS if known.get(part) == _hash(part, root))


def write_down(passed: Iterable[str], root: Path = REPO, record: Path = RECORD) -> None:
    """Record that parts passed with the files that are there now."""
    known = _known(record) | {part: _hash(part, root) for part in passed}
    record.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def _known(record: Path) -> dict[str, str]:
    return dict(json.loads(record.read_text())) if record.exists() else {}


def _hash(part: str, root: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(files_of(part, root)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(f"{file.relative_to(root)} {content}\n".encode())
    return found.hexdigest()


def files_of(part: str, root: Path = REPO) -> set[Path]:
    """Return the files that decide whether a part passes."""
    found: set[Path] = set()
    left = [file for path in PARTS[part] for file in _files(root / path)]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imported(file, root) if file.suffix == ".py" else ()
    return found


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """Yield the modules of tests and benchmarks that a file imports, by their whole names."""
    for module, names in _IMPORT.findall(file.read_text(encoding="utf-8")):
        folder = root / module.replace(".", "/")
        parts = (folder / name for name in re.findall(r"\w+", names))
        for one in (folder, *parts):
            yield from filter(Path.exists, (one.with_suffix(".py"), one / "__init__.py"))


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or those below a folder, without what tools leave there."""
    if path.is_file():
        yield path
        return
    for one in path.iterdir():
        if not one.name.startswith((".", "__pycache__")):
            yield from _files(one)
