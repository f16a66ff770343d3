"""Compile the modules that engines import, so that the first engines need not, each on its own.

Run by `scripts/install` with the Python of `.venv`. All of site-packages would take four times as
long, and most of it is never imported, so this follows the imports at the top level of files. What
is imported inside functions, beyond the entry points below, is compiled when it is first used.
"""

from __future__ import annotations

import compileall
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

# The engines' own entry points, then what is imported inside functions and brings much with it.
ENTRY_POINTS = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.models.deepseek_v4.cpu.model",
    "lmcache.integration.vllm.vllm_v1_adapter",
    "lmcache.v1.platform.devices.cpu.device_ops",
    "lmcache.v1.storage_backend.connector.redis_connector",
    "torch._inductor.kernel.mm_grouped",
    "torch.distributed._composable.fsdp",
    "torch.onnx.operators",
    "transformers.generation.utils",
    "huggingface_hub._snapshot_download",
    "numpy.polynomial",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "httpx._main",
)

_IMPORT = re.compile(
    r"^(?:from[ ]+(\.*)([\w.]*)[ ]+import[ ]*(\([^)]*\)|.*)|import[ ]+(.*))", re.MULTILINE
)


def main() -> None:
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    compile_files(imported_files(ENTRY_POINTS, folders))


def imported_files(entry_points: Iterable[str], folders: Iterable[Path]) -> list[Path]:
    """Return the files of the modules that importing `entry_points` brings in."""
    folders = tuple(folders)
    files: dict[str, Path | None] = {}
    todo = list(entry_points)
    while todo:
        module = todo.pop()
        if module in files:
            continue
        file = files[module] = module_file(module, folders)
        if file:
            todo += [module.rpartition(".")[0], *_imports(file, module)]
    return [file for file in files.values() if file]


def module_file(module: str, folders: Iterable[Path]) -> Path | None:
    """Return where a module is, if it is one: a name that is imported may be a class, too."""
    for folder in folders if module else ():
        path = folder.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


def compile_files(files: Iterable[Path]) -> None:
    """Compile on all processors. A file that does not compile is not imported either."""
    # Bytecode goes beside its source, even where the user's shell says that none is to be written.
    compile_file = partial(compileall.compile_file, quiet=2)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(compile_file, files, chunksize=32):
            pass


def _imports(file: Path, module: str) -> Iterator[str]:
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    source = file.read_text(encoding="utf-8", errors="replace")
    for dots, base, names, plain in _IMPORT.findall(source):
        if plain:
            yield from (words[0] for part in plain.split(",") if (words := part.split()))
            continue
        parents = package[: len(package) + 1 - len(dots)] if dots else []
        origin = ".".join([*parents, base] if base else parents)
        yield origin
        yield from (f"{origin}.{name}" for name in re.findall(r"\w+", names))


if __name__ == "__main__":
    main()
