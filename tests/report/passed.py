"""Parts of a run that prove nothing new while the files they test are those of their last pass.

passed.json, which is committed, has a hash of these files for each part. scripts/test leaves a part
out whose files have that hash; scripts/test full leaves out none. Both write down what passed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.report.results import REPO

RECORD = Path(__file__).with_name("passed.json")
# Part → its end-to-end tests. Every other part is a step of its own name.
E2E = {
    "gpu-proof": ("tests/e2e/test_gpu_proof.py",),
    "lmcache-mp": ("tests/e2e/docker/test_swap_connector.py", "tests/e2e/test_kv_server.py"),
    "podman": ("tests/e2e/docker/test_kubernetes.py",),
    "user-redis": ("tests/e2e/test_own_redis.py", "tests/e2e/test_several_hosts.py"),
}
_ENGINES = ("deploy/connector", "images/cpu/requirements.lock")
_WHEELS = ("tests/conftest.py", "tests/wheels.py")
# All that a running stack is made of, and that starts, checks and stops it.
_STACK = (
    *_ENGINES, "compose", "deploy/assets.py", "deploy/config", "deploy/metrics", "deploy/planning",
    "deploy/router", "deploy/runtime", "deploy/stack", "deploy/tiny_model", "deploy/verify",
    "deploy/workflows", "images", "tests/conftest.py", "tests/e2e/conftest.py",
    "tests/e2e/engines.py", "tests/e2e/traffic.py",
)  # fmt: skip
# Part → the files and folders that decide whether it passes.
PARTS = {
    # Fixes on each LMCache: the connector, the releases and the cells.
    "versions": (
        *_ENGINES, *_WHEELS, "bench/redis_server.py", "docs/reference/fixes.md", "tests/versions",
    ),
    # vLLM's GPU code: what the kit renders, which the goldens hold, and the metrics that it reads.
    "gpu": (
        *_ENGINES, *_WHEELS, "compose", "deploy/config/catalog.py", "deploy/metrics/engine.py",
        "deploy/stack/cluster/autoscaling.py", "deploy/tiny_model", "deploy/verify/eligible.py",
        "deploy/workflows/bench/counters.py", "images/catalog.yaml", "tests/golden/compose",
        "tests/golden/process", "tests/golden_documents.py", "tests/gpu",
    ),
    # Pods in podman: how an export is made of a stack, what it is for CPUs, and its images. What
    # runs inside is what test_one_stack.py runs in Docker.
    "podman": (
        *_ENGINES, "deploy/cli/cluster_check.py", "deploy/stack/cluster",
        "deploy/workflows/cluster_check.py", "deploy/workflows/cluster_counters.py",
        "deploy/workflows/cluster_document.py", "images",
        "tests/e2e/conftest.py", "tests/e2e/podman.py", "tests/golden/kubernetes",
        "tests/unit/workflows/test_export.py", *E2E["podman"],
    ),
    # The other connector, another Redis and several hosts: what they share with every stack is
    # tested by the files that always run.
    "lmcache-mp": (
        *_STACK, "bench/check_power", "tests/e2e/docker/conftest.py",
        "tests/e2e/docker/test_isolation.py", "tests/e2e/prometheus.py",
        "tests/e2e/store_vandals.py", *E2E["lmcache-mp"],
    ),
    "user-redis": (
        *_STACK, "bench/redis_server.py", "tests/connector/redis_servers.py",
        "tests/e2e/two_networks.py", *E2E["user-redis"],
    ),
    "gpu-proof": (
        *_STACK, "bench/gpu_proof", "bench/kit.py", "scripts/gpu-proof", *E2E["gpu-proof"],
    ),
}  # fmt: skip


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
    for file in sorted(file for path in PARTS[part] for file in _files(root / path)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(f"{file.relative_to(root)} {content}\n".encode())
    return found.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or those below a folder, without what tools leave there."""
    if path.is_file():
        yield path
        return
    for one in path.iterdir():
        if not one.name.startswith((".", "__pycache__")):
            yield from _files(one)
