"""The facts of each pair on each vendor, told by processes of their own, two at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.gpu.goldens import VENDORS
from tests.gpu.pairs import PAIRS, installed

HERE = Path(__file__).parent
Facts = dict[str, Any]

# What would change what vLLM or LMCache choose.
_LEAKING = ("VLLM_", "LMCACHE_", "CUDA_", "HIP_", "ROCR_", "PDKIT_DISABLE", "PYTHONPATH")

# Each takes half a minute of one core, and all together may wait for their wheels.
_HANGS = 1500


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(_HANGS))


@pytest.fixture(scope="session")
def all_facts(request: pytest.FixtureRequest) -> Iterator[dict[Any, Future[Facts]]]:
    callspecs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    wanted = dict.fromkeys(spec.params["facts"] for spec in callspecs if "facts" in spec.params)
    with ThreadPoolExecutor(2) as pool:
        yield {which: pool.submit(told, *which) for which in wanted}


@pytest.fixture(params=[(pair, vendor) for pair in PAIRS for vendor in VENDORS], ids="-".join)
def facts(request: pytest.FixtureRequest, all_facts: dict[Any, Future[Facts]]) -> Facts:
    return all_facts[request.param].result()


def told(pair: str, vendor: str, program: str = "tests.gpu.facts") -> Facts:
    """Ask the pair's code, on a vendor's emulated GPUs."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LEAKING)}
    environ |= {
        "PYTHONPATH": os.pathsep.join(
            str(folder) for folder in (installed(pair), REPO / "deploy" / "connector")
        ),
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "LMCACHE_TRACK_USAGE": "false",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = (sys.executable, "-m", program, vendor)
    done = subprocess.run(
        command,
        cwd=REPO,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=_HANGS,
    )
    assert done.returncode == 0, f"{pair} on {vendor}: {done.stderr[-4000:]}"
    facts: Facts = json.loads(done.stdout)
    return {"pair": pair, "vendor": vendor, **facts}
