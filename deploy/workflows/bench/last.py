"""Stores the last measured break-even, which `plan` and `doctor` show."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from deploy.benchmark.break_even import speeds_at_ends
from deploy.benchmark.results import Result
from deploy.planning.break_even import LastBenchmark, break_even_tokens
from deploy.runtime.home import Home, write_private
from deploy.runtime.last_measured import key_of, read_measured


def keep_break_even(home: Home, result: Result, folder: Path) -> None:
    """Store the break-even of a result, if it has one, at its lowest and highest load."""
    speeds = speeds_at_ends(result)
    if not speeds:
        return
    gpu = result.machine.gpus[0] if result.machine.gpus else ""
    key = key_of(result.model.name, result.machine.processor, gpu)
    tokens = {load: break_even_tokens(one) for load, one in speeds.items()}
    found = LastBenchmark(tokens, result.started, str(folder))
    known = {name: asdict(one) for name, one in {**read_measured(home), key: found}.items()}
    write_private(home.measured_file, json.dumps(known, indent=1))
