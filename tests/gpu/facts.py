"""What one pair of vLLM and LMCache makes of every golden of a vendor, as JSON on stdout.

Run as `python -m tests.gpu.facts VENDOR` with the pair's code first on PYTHONPATH. What patches the
process is done in forks of it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from deploy.connector.pdkit_connector.identity.model_files import DIGEST_VARIABLE
from tests.gpu import emulated, goldens
from tests.gpu.forked import in_fork

PROMPTS = range(510, 516)
LOGPROBS_PROMPT = 600
# What forks would each import.
_SHARED = (
    "lmcache.integration.vllm.vllm_v1_adapter",
    "lmcache.v1.cache_engine",
    "lmcache.v1.gpu_connector",
    "lmcache.v1.storage_backend.connector.redis_adapter",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
)

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def main(vendor: str) -> None:
    told = os.dup(1)
    os.dup2(2, 1)  # what vLLM and LMCache print
    gc.disable()  # imports make no garbage
    emulated.install(vendor)
    for name in _SHARED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    with tempfile.TemporaryDirectory() as folder:
        facts = _facts(vendor, Path(folder))
    with os.fdopen(told, "w") as stdout:
        json.dump(facts, stdout)


def _facts(vendor: str, folder: Path) -> dict[str, Any]:
    import lmcache
    import vllm
    from pdkit_connector.identity.kv_identity import take_rows_early

    from tests.gpu.engines import make_model

    take_rows_early()
    model = str(make_model(folder / "model"))
    engines = [served(engine, model) for engine in goldens.engines(vendor)]
    consumer = next(engine for engine in engines if engine.name == "consumer-0")
    process = next(engine for engine in engines if engine.golden.startswith("process/"))
    sharing = [engine for engine in engines if engine.lmcache]
    return {
        "code": {"vllm": vllm.__file__, "lmcache": lmcache.__file__},
        "releases": {name: importlib.metadata.version(name) for name in ("vllm", "lmcache")},
        "engines": {f"{one.golden} {one.name}": engine_facts(one) for one in engines},
        "ranks": {tp: _ranks(consumer, tp) for tp in ("1", "2", "4")},
        "unpinned": _configuration(_unpinned(consumer)),
        "lifted": _configuration(_lifted(consumer)),
        "settings": {one.golden: _settings(one, folder) for one in sharing},
        "fixes": {
            f"{one.golden} {one.name}": in_fork(lambda one=one: _fixes(one, folder))
            for one in sharing
            if one.name.endswith("-0")
        },
        "metrics": _metrics(consumer),
        "steps": _all_steps(consumer),
        "prompt logprobs": {
            fixes: in_fork(lambda off=off: _logprobs_step(consumer, off))
            for fixes, off in (("fixed", ()), ("unfixed", ("B25",)))
        },
        "sampler": {
            name: in_fork(lambda env=env: _sampler(env))
            for name, env in (("rendered", process.env), ("unset", {}))
        },
        "recomputed": {
            name: in_fork(lambda one=one: _recomputed(one))
            for name, one in (("pinned", consumer), ("asynchronous", _asynchronous(consumer)))
        },
    }


def served(engine: goldens.Engine, model: str) -> goldens.Engine:
    """Return an engine that serves a model that is here."""
    from tests.gpu.engines import changed, parsed

    parsed(engine.argv)
    return replace(engine, argv=tuple(changed(engine.argv, model=model)))


def _asynchronous(engine: goldens.Engine) -> goldens.Engine:
    return replace(engine, argv=(*engine.argv, "--async-scheduling"))


def _lifted(engine: goldens.Engine) -> goldens.Engine:
    """Return an engine as a user runs it who takes both pins off."""
    return replace(_asynchronous(engine), env={**engine.env, _RUNNER: "1"})


def _unpinned(engine: goldens.Engine) -> goldens.Engine:
    """Return an engine that vLLM chooses runner and scheduling for."""
    return replace(
        engine,
        argv=tuple(word for word in engine.argv if word != "--no-async-scheduling"),
        env={name: value for name, value in engine.env.items() if name != _RUNNER},
    )


def config_of(engine: goldens.Engine) -> Any:
    """Return what vLLM's server makes of an engine's arguments."""
    from tests.gpu.engines import configuration

    with _environment(engine):
        return configuration(engine.argv)


def _environment(engine: goldens.Engine) -> AbstractContextManager[Any]:
    """Set what an engine is started with and its configuration is made of."""
    wanted = (_RUNNER, "PYTHONHASHSEED", DIGEST_VARIABLE)
    return mock.patch.dict(os.environ, {k: v for k, v in engine.env.items() if k in wanted})


def engine_facts(engine: goldens.Engine) -> dict[str, Any]:
    """Return an engine's arguments, and what vLLM configures by them."""
    from pdkit_connector.identity.kv_identity import identified

    config = config_of(engine)
    transfer = config.kv_transfer_config
    return {
        "argv": engine.argv,
        "transfer": {
            "connector": transfer.kv_connector,
            "module": transfer.kv_connector_module_path,
            "role": transfer.kv_role,
            "failures": transfer.kv_load_failure_policy,
        }
        if transfer
        else None,
        "identity": identified(config)[1] if transfer else None,
        **_configuration(engine),
    }


def _configuration(engine: goldens.Engine) -> dict[str, Any]:
    config = config_of(engine)
    with _environment(engine):
        second = config.use_v2_model_runner
    scheduling = config.scheduler_config
    return {
        "second_runner": second,
        "asynchronous": scheduling.async_scheduling,
        "chunked_prefill": scheduling.enable_chunked_prefill,
        "batched_tokens": scheduling.max_num_batched_tokens,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "executor": config.parallel_config.distributed_executor_backend,
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "max_model_len": config.model_config.max_model_len,
        "dtype": str(config.model_config.dtype),
        "cache_dtype": str(config.cache_config.cache_dtype),
    }


def _ranks(engine: goldens.Engine, tp: str) -> dict[str, Any]:
    from tests.gpu.engines import changed

    argv = tuple(changed(engine.argv, tensor_parallel_size=tp))
    return _configuration(replace(engine, argv=argv))


def _settings(engine: goldens.Engine, folder: Path) -> dict[str, Any]:
    """Return each setting of an LMCache file: what it says, and what LMCache makes of it."""
    import yaml
    from lmcache.v1.config import LMCacheEngineConfig

    config = LMCacheEngineConfig.from_file(_file(engine, folder))
    return {
        name: {"given": value, "taken": getattr(config, name, "unknown")}
        for name, value in yaml.safe_load(Path(_file(engine, folder)).read_text()).items()
    }


def _file(engine: goldens.Engine, folder: Path) -> str:
    file = folder / "lmcache.yaml"
    file.write_text(engine.lmcache.replace("@{redis_password}", "x"))
    return str(file)


def _fixes(engine: goldens.Engine, folder: Path) -> dict[str, Any]:
    """Return what becomes of each fix in an engine."""
    from pdkit_connector.registry import Registry, Setting, discover

    from tests.gpu.steps import Consumer

    os.environ["LMCACHE_CONFIG_FILE"] = _file(engine, folder)
    config = config_of(engine)
    outcomes = Registry(discover()).apply(Setting.from_vllm(config, Consumer(config).kv), ())
    return {outcome.fix.id: [outcome.state.value, outcome.evidence] for outcome in outcomes}


def _metrics(engine: goldens.Engine) -> list[str]:
    """Return the names of all samples that vLLM's own metrics can have."""
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    # As when the engine has started, which adds the facts of its configuration.
    PrometheusStatLogger(config_of(engine)).log_engine_initialized()
    families = [family for family in REGISTRY.collect() if family.name.startswith("vllm:")]
    samples = {sample.name for family in families for sample in family.samples}
    counters = {f"{family.name}_total" for family in families if family.type == "counter"}
    return sorted({family.name for family in families} | samples | counters)


def _all_steps(engine: goldens.Engine) -> dict[str, Any]:
    """Return the first step of each prompt: pinned and not, with fix B22 and without."""
    return {
        f"{pins}, {fixes}": in_fork(lambda one=one, off=off: _steps(one, off))
        for pins, one in (("pinned", engine), ("unpinned", _unpinned(engine)))
        for fixes, off in (("fixed", ()), ("unfixed", ("B22",)))
    }


def _steps(engine: goldens.Engine, without: Sequence[str]) -> dict[str, Any]:
    from tests.gpu.steps import Consumer

    _apply_fixes(without)
    config = config_of(engine)
    with _environment(engine):
        return {str(tokens): Consumer(config).first_step(tokens) for tokens in PROMPTS}


def _apply_fixes(without: Sequence[str]) -> None:
    from pdkit_connector.registry import Registry, Setting, discover

    Registry(discover()).apply(Setting(), without)


def _logprobs_step(engine: goldens.Engine, without: Sequence[str]) -> dict[str, Any]:
    """Return the first step of a stored prompt whose logprobs are requested."""
    from tests.gpu.steps import Consumer

    _apply_fixes(without)
    config = config_of(engine)
    with _environment(engine):
        return Consumer(config).first_step(LOGPROBS_PROMPT, prompt_logprobs=1)


def _sampler(env: Mapping[str, str]) -> str:
    """Return which function of vLLM's would sample, on a machine that has no FlashInfer."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    with mock.patch.dict(os.environ, env), mock.patch.dict(sys.modules, {"flashinfer": None}):
        return str(TopKTopPSampler().forward.__name__)


def _recomputed(engine: goldens.Engine) -> int:
    """Return how many tokens are computed after the load of a 512-token prompt failed."""
    from tests.gpu.steps import Consumer

    return Consumer(config_of(engine)).step_after_failed_load(512)


if __name__ == "__main__":
    main(sys.argv[1])
