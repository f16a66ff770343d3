"""The speeds that decide whether loading KV pays, as a run measured them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from deploy.benchmark.compare import by_load
from deploy.benchmark.results import Repeat, Result
from deploy.planning.break_even import Speeds
from deploy.planning.engines import PREFILL

ONE_USER = "one request at a time"


def measured_speeds(result: Result) -> dict[str, Speeds]:
    """Return the speeds of one user, then at each load of a run, the lowest first.

    They are medians of the repeats. Empty if the run has none of them: nothing was loaded, or the
    engines do not report it.
    """
    alone = {ONE_USER: [result.one_user]} if result.one_user else {}
    found = {}
    for load, repeats in (*alone.items(), *sorted(by_load(result.repeats).items(), key=_offered)):
        speeds = _speeds(result, repeats)
        if speeds:
            found[load] = speeds
    return found


def _offered(load: tuple[str, Sequence[Repeat]]) -> float:
    first = load[1][0]
    return first.rate or first.concurrency or 0.0


def speeds_at_ends(result: Result) -> dict[str, Speeds]:
    """Return the speeds at the first and the last load: of one user, and at the highest load."""
    speeds = measured_speeds(result)
    loads = list(speeds)
    return {load: speeds[load] for load in (*loads[:1], *loads[-1:])}


def _speeds(result: Result, repeats: Sequence[Repeat]) -> Speeds | None:
    token_bytes = result.model.kv_bytes_a_token
    prefill = [speed for one in repeats if (speed := _prefill_tokens_s(one))]
    # Engines do not tell how long they wait for LMCache's server, nor how fast it loads for them.
    paths = [
        path
        for one in repeats
        if (path := one.redis_path) and path.load_gb_s > 0 and not path.by_server
    ]
    if not (token_bytes and prefill and paths):
        return None
    return Speeds(
        prefill_tokens_s=median(prefill),
        load_gb_s=median(path.load_gb_s * path.ranks for path in paths),
        lookup_s=median(path.lookup_ms for path in paths) / 1e3,
        token_bytes=token_bytes,
        chunk=result.stack.chunk_size,
    )


def _prefill_tokens_s(repeat: Repeat) -> float | None:
    """Return the tokens that a request's prefill computed in a second, beside the other requests.

    Tokens that consumers compute, less than a chunk of each prompt, are among them.
    """
    stages = next((repeat.stages[role] for role in PREFILL if role in repeat.stages), {})
    seconds = prefill_s(stages)
    if not (seconds and repeat.hits and repeat.completed):
        return None
    return repeat.hits.computed / repeat.completed / seconds


def prefill_s(stages: Mapping[str, float]) -> float:
    """Return the seconds of prefill itself.

    For vLLM it begins with the step that schedules a request, in which the connector looks the
    prompt up and loads it.
    """
    waits_s = stages.get("lookup", 0.0) + stages.get("load", 0.0)
    return max(0.0, stages.get("prefill", 0.0) - waits_s)
