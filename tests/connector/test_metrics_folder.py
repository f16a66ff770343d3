"""LMCache's folder for metrics is removed when its process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONNECTOR = Path(__file__).resolve().parents[2] / "deploy" / "connector"
MAKE = """
import multiprocessing, os
from pdkit_connector.fixes.b24_metrics_folder import _with_own_folder

def make():
    _with_own_folder(lambda: None)
    folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
    open(f"{folder}/counter_1.db", "w").close()
    print(folder, flush=True)

def fork():
    core = multiprocessing.get_context("fork").Process(target=make)
    core.start()
    core.join()
"""


@pytest.mark.parametrize("by", ["make()", "fork()"])
def test_it_is_removed_when_its_process_ends(tmp_path, by):
    env = {**os.environ, "PYTHONPATH": str(CONNECTOR), "TMPDIR": str(tmp_path)}
    env.pop("PROMETHEUS_MULTIPROC_DIR", None)
    argv = (sys.executable, "-c", MAKE + by)
    said = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
    assert Path(said.strip()).parent == tmp_path
    assert not list(tmp_path.glob("lmcache_prometheus-*"))
