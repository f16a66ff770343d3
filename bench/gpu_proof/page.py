"""The page of results: what passed on which GPU, and what failed."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu_proof.results import WRONG_ANSWERS, Result
from bench.gpu_proof.steps import Step
from deploy.runtime.host import engine_versions

Found = Sequence[tuple[Step, Result | None]]
_PAGE = """# Tested on {name}

**{verdict}**

`scripts/gpu-proof` wrote this page on {date}. Engines ({engines}) as processes, one producer and
one consumer, on a Llama with random bfloat16 weights. Machine: {machine}.

- **tolerated**: the difference in log-probability that an engine's own noise can explain: between
  its computed answer and its answer from its own prefix cache, as `deploy check` measures it;
  **difference**: the largest between the computed answer and the one from loaded KV;
  **wrong KV**: to the answer to a prompt with another first half.

{steps}

{pins}{sections}"""
_PINS = """## Can the pins be lifted?

The vendor table keeps engines on GPUs on vLLM's first model runner with synchronous scheduling, as
in all other steps, until this table shows that another combination is right.

{table}

"""


def text(name: str, found: Found) -> str:
    """Return the page as Markdown."""
    return _PAGE.format(
        name=name,
        verdict=_verdict(found),
        date=datetime.datetime.now(tz=datetime.timezone.utc).date(),
        engines=_engines(),
        machine=_machine(),
        steps=steps_table(found),
        pins=_pins(found),
        sections="\n".join(_section(step, result) for step, result in found if result),
    )


def _engines() -> str:
    vllm, lmcache = engine_versions(sys.executable)
    return f"vLLM {vllm}, LMCache {lmcache}, torch {importlib.metadata.version('torch')}"


def _machine() -> str:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}, Python "
        f"{platform.python_version()}, load average at the end {os.getloadavg()[0]:.1f}"
    )


def _verdict(found: Found) -> str:
    ended = [result for _, result in found if result]
    failed = [result.step for result in ended if not result.passed]
    if failed:
        return f"FAILED: {', '.join(failed)}."
    passed = sum(result.verdict == "passed" for result in ended)
    if missing := len(found) - len(ended):
        return f"{passed} of {len(found)} steps passed; not run: {missing}."
    if wrong := len(ended) - passed:
        return f"All {passed} steps with the pins passed; {wrong} without them had wrong answers."
    return f"All {passed} steps passed."


def steps_table(found: Found) -> str:
    """Return each step with its result."""
    lines = ["| step | what | result | seconds |", "|---|---|---|---|"]
    for step, result in found:
        said = result.verdict if result else "not run"
        seconds = "" if result is None else f"{result.seconds:.0f}"
        lines.append(f"| {step.name} | {step.title} | {said} | {seconds} |")
    return "\n".join(lines)


def _pins(found: Found) -> str:
    lines = [
        f"| {step.title} | {'no' if wrong else 'yes'} | {'; '.join(wrong) or '-'} |"
        for step, result in found
        if result and (wrong := result.facts.get(WRONG_ANSWERS)) is not None
    ]
    head = "| combination | right | why not |\n|---|---|---|\n"
    return _PINS.format(table=head + "\n".join(lines)) if lines else ""


def _section(step: Step, result: Result) -> str:
    failures = [f"- **{failure}**" for failure in result.failures]
    plain = [
        f"- {name}: {_shown(value)}"
        for name, value in result.facts.items()
        if not _is_table(value) and value not in ([], None)
    ]
    tables = [_table(value) for value in result.facts.values() if _is_table(value)]
    parts = ["\n".join([*failures, *plain]), *tables, f"Kit: {result.commit or 'no commit'}."]
    return f"## {step.name}: {step.title}\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
