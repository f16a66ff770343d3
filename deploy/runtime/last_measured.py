"""What benchmarks measured last on this machine, by model, processor and GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.planning.plan import Plan
from deploy.runtime.home import Home
from deploy.runtime.host import processor_name
from deploy.runtime.own_files import read_json

if TYPE_CHECKING:
    from deploy.planning.break_even import LastBenchmark


def last_measured(home: Home, plan: Plan) -> LastBenchmark | None:
    """Return the last benchmark of the plan's model on this machine; None without one."""
    if not plan.shares_kv or not (known := read_measured(home)):
        return None
    gpus = [gpu for engine in plan.engines for gpu in engine.gpus]
    gpu = gpus[0].name if gpus else ""
    return known.get(key_of(plan.model.served_name, processor_name(), gpu))


def key_of(model: str, processor: str, gpu: str) -> str:
    """Return under what a measurement is kept: it holds for this model on this hardware."""
    return " | ".join((model, processor, gpu))


def read_measured(home: Home) -> dict[str, LastBenchmark]:
    """Return all measurements; empty if the file cannot be read."""
    try:
        found = read_json(home.measured_file)
        from deploy.planning.break_even import LastBenchmark

        made = {key: LastBenchmark(**one) for key, one in found.items()}
        return {key: one for key, one in made.items() if isinstance(one.tokens, dict)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
