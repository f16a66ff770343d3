"""LMCache's folder for metrics is removed when its process ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_process import run_python

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
def test_it_is_removed_when_its_process_ends(monkeypatch, tmp_path, by):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    printed = run_python("-c", MAKE + by, TMPDIR=str(tmp_path)).stdout
    assert Path(printed.strip()).parent == tmp_path
    assert not list(tmp_path.glob("lmcache_prometheus-*"))
