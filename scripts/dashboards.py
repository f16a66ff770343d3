"""Write Grafana's dashboards: .venv/bin/python scripts/dashboards.py"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh, VariableSort

FOLDER = Path(__file__).resolve().parents[1] / "compose" / "monitoring" / "dashboards"
_PROMETHEUS = DataSourceRef(type_val="prometheus", uid="pdkit")
_STACK, _SERVICE = 'stack="$stack"', 'service=~"$service"'
_HEIGHT = 8
_REF_IDS = ascii_uppercase


@dataclass(frozen=True)
class Panel:
    """A panel: lines over time, or as `number` the last value.

    Attributes:
        lines: legend → expression; `{of}` in it is the selection of what the dashboard shows.
        unit: by Grafana's names; "" for a plain number.
    """

    title: str
    lines: dict[str, str]
    unit: str = ""
    number: bool = False
    span: int = 8


@dataclass(frozen=True)
class Board:
    """A dashboard; with `jobs`, the reader can choose among their services."""

    uid: str
    title: str
    panels: Sequence[Panel]
    jobs: str = ""


def _rate(metric: str, **labels: str) -> str:
    return f"rate({_of(metric, **labels)}[1m])"


def _of(metric: str, **labels: str) -> str:
    own = "".join(f",{name}{value}" for name, value in labels.items())
    return f"{metric}{{{{of}}{own}}}"


def _p95(metric: str, by: str) -> str:
    return f"histogram_quantile(0.95, sum by ({by}, le) ({_rate(f'{metric}_bucket')}))"


def _mean(metric: str, by: str) -> str:
    total, count = (_rate(f"{metric}_{part}") for part in ("sum", "count"))
    return f"sum by ({by}) ({total}) / sum by ({by}) ({count})"


def _ratio(hits: str, queries: str, by: str, **labels: str) -> str:
    return f"sum by ({by}) ({_rate(hits, **labels)}) / sum by ({by}) ({_rate(queries, **labels)})"


def _chunks(operation: str, result: str) -> str:
    of = {"operation": f'="{operation}"', "result": result}
    return f"sum by (service) ({_rate('pdkit_store_chunks_total', **of)})"


def _front(name: str) -> str:
    return _rate(f"pdkit_router_{name}_total")


_TTFT, _ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_STORE_HITS = ("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total")
_LOCAL_HITS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
_REQUESTS = Panel("Requests", {"requests": _front("requests")}, "reqps")
_TROUBLE = Panel(
    "Requests with trouble",
    {name: _front(name) for name in ("errors", "retries", "continued", "degraded", "cancelled")},
    "reqps",
)

OVERVIEW = Board(
    "pdkit-overview", "pdkit: overview",
    (
        Panel("Firing alerts",
              {"alerts": 'count(ALERTS{{of},alertstate="firing"}) or vector(0)'}, number=True),
        Panel("Services that answer", {"up": f"sum({_of('up')})", "of": f"count({_of('up')})"},
              number=True),
        Panel("Store hit rate of consumers",
              {"hits": _ratio(*_STORE_HITS, "stack", role='="consumer"')}, "percentunit",
              number=True),
        _REQUESTS,
        _TROUBLE,
        Panel("Tokens",
              {"prompt, {{role}}": f"sum by (role) ({_rate('vllm:prompt_tokens_total')})",
               "generated, {{role}}": f"sum by (role) ({_rate('vllm:generation_tokens_total')})"},
              "cps"),
        Panel("Time to first token, 95 % within", {"{{role}}": _p95(_TTFT, "role")}, "s"),
        Panel("Time between tokens, 95 % within", {"{{role}}": _p95(_ITL, "role")}, "s"),
        Panel("Waiting requests", {"{{service}}": _of("vllm:num_requests_waiting")}),
    ),
)  # fmt: skip

ENGINES = Board(
    "pdkit-engines", "pdkit: engines",
    (
        Panel("Running requests", {"{{service}}": _of("vllm:num_requests_running")}),
        Panel("Waiting requests", {"{{service}}": _of("vllm:num_requests_waiting")}),
        Panel("KV blocks in use", {"{{service}}": _of("vllm:kv_cache_usage_perc")}, "percentunit"),
        Panel("Prompt tokens", {"{{service}}": _rate("vllm:prompt_tokens_total")}, "cps"),
        Panel("Generated tokens", {"{{service}}": _rate("vllm:generation_tokens_total")}, "cps"),
        Panel("Preemptions", {"{{service}}": _rate("vllm:num_preemptions_total")}, "ops"),
        Panel("Time to first token, 95 % within", {"{{service}}": _p95(_TTFT, "service")}, "s"),
        Panel("Time between tokens, 95 % within", {"{{service}}": _p95(_ITL, "service")}, "s"),
        Panel("Where a request's time goes, mean",
              {f"{{{{service}}}} {stage}": _mean(f"vllm:request_{stage}_time_seconds", "service")
               for stage in ("queue", "prefill", "decode")}, "s"),
    ),
    jobs="engines",
)  # fmt: skip

KV = Board(
    "pdkit-kv", "pdkit: KV path",
    (
        Panel("Prompt tokens by source",
              {"{{role}} {{source}}":
               f"sum by (role, source) ({_rate('vllm:prompt_tokens_by_source_total')})"},
              "cps"),
        Panel("Store hit rate", {"{{service}}": _ratio(*_STORE_HITS, "service")}, "percentunit"),
        Panel("Hit rate of the engine's own cache",
              {"{{service}}": _ratio(*_LOCAL_HITS, "service")}, "percentunit"),
        Panel("KV moved",
              {"{{service}} {{operation}}": _rate("pdkit_store_bytes_total")}, "Bps"),
        Panel("Speed while moving",
              {"{{service}} {{operation}}":
               f"{_rate('pdkit_store_bytes_total')} / {_rate('pdkit_store_seconds_total')}"},
              "Bps"),
        Panel("A lookup, mean",
              {"{{service}}": "sum by (service) ({}) / sum by (service) ({})".format(*(
                  _rate(f"pdkit_store_{what}_total", operation='="lookup"')
                  for what in ("seconds", "calls")))}, "s"),
        Panel("Chunks refused: corrupt or foreign",
              {"{{service}}": _chunks("load", '=~"corrupt|foreign"')}, "ops"),
        Panel("Chunks not loaded: late or gone",
              {"{{service}}": _chunks("load", '!~"loaded|corrupt|foreign"')}, "ops"),
        Panel("Chunks read again: replaced while they were loaded",
              {"{{service}}": "sum by (service) ({})".format(
                  _rate("pdkit_store_replaced_total"))}, "ops"),
        Panel("Chunks lost: not stored",
              {"{{service}}": _chunks("store", '!="stored"')}, "ops"),
        Panel("Answers sent before their KV was stored",
              {"{{service}}": "sum by (service) ({})".format(
                  _rate("pdkit_store_barrier_waits_total", result='!="stored"'))}, "ops"),
        Panel("An answer's wait for its stores, mean",
              {"{{service}}": "sum by (service) ({}) / sum by (service) ({})".format(*(
                  _rate(f"pdkit_store_barrier_{what}_total") for what in ("seconds", "waits")))},
              "s"),
    ),
    jobs="engines|kv-server",
)  # fmt: skip


def _by_shard(expression: str) -> dict[str, str]:
    """Return one line for values that all engines report equally."""
    return {"shard {{shard}}": f"max by (shard) ({expression})"}


REDIS = Board(
    "pdkit-redis", "pdkit: Redis",
    (
        Panel("Engines that reach it, or LMCache's server",
              {"shard {{shard}}": f"sum by (shard) ({_of('pdkit_redis_up')})"}),
        Panel("Memory in use", _by_shard(_of("pdkit_redis_used_memory_bytes")), "bytes"),
        Panel("Memory limit", _by_shard(_of("pdkit_redis_max_memory_bytes")), "bytes"),
        Panel("Evicted keys", _by_shard(_rate("pdkit_redis_evicted_keys_total")), "ops"),
        Panel("Commands", _by_shard(_rate("pdkit_redis_commands_total")), "ops"),
        Panel("Clients", _by_shard(_of("pdkit_redis_clients"))),
        Panel("Received", _by_shard(_rate("pdkit_redis_received_bytes_total")), "Bps"),
        Panel("Sent", _by_shard(_rate("pdkit_redis_sent_bytes_total")), "Bps"),
    ),
)  # fmt: skip


def _server(metric: str, **labels: str) -> str:
    """Return the sum over what LMCache tells apart: model, salt, kind of memory."""
    return f"sum ({_of(f'lmcache_mp_{metric}', **labels)})"


def _server_rate(metric: str, **labels: str) -> str:
    return f"sum ({_rate(f'lmcache_mp_{metric}_total', **labels)})"


_USED, _USED_PART = _server("l1_memory_usage_bytes"), _server("l1_usage_ratio")
_ASKED, _FOUND, _LOADED = (
    _server_rate(f"lookup_{what}_tokens") for what in ("requested", "hit_l1", "hit_l2")
)

KV_SERVER = Board(
    "pdkit-kv-server", "pdkit: LMCache's server",
    (
        Panel("Memory for KV", {"used": _USED, "of": f"{_USED} / ({_USED_PART} > 0)"}, "bytes"),
        Panel("Part of it in use", {"used": _USED_PART}, "percentunit"),
        Panel("Evicted chunks", {"evicted": _server_rate("l1_evicted_chunks")}, "ops"),
        Panel("Tokens looked up",
              {"found": _FOUND, "loaded from Redis": _LOADED,
               "missed": f"{_ASKED} - {_server_rate('lookup_hit_tokens')}"}, "cps"),
        Panel("Hit rate",
              {"found": f"{_FOUND} / {_ASKED}", "loaded from Redis": f"{_LOADED} / {_ASKED}"},
              "percentunit"),
        Panel("Chunks written and read",
              {"written": _server_rate("l1_write_chunks"),
               "read": _server_rate("l1_read_chunks")}, "ops"),
        Panel("Chunks to and from Redis",
              {"stored": _server_rate("l2_store_completed_objects_chunks"),
               "loaded": _server_rate("l2_prefetch_load_completed_chunks")}, "ops"),
        Panel("Chunks without room",
              {"not stored": _server_rate("l1_allocation_failure_chunks"),
               "not loaded from Redis":
               _server_rate("l2_prefetch_failure_chunks", reason='="l1_oom"')}, "ops"),
    ),
)  # fmt: skip

FRONT = Board(
    "pdkit-front", "pdkit: router",
    (
        _REQUESTS,
        _TROUBLE,
        Panel("Requests under way", {"{{engine}}": _of("pdkit_router_engine_busy")}),
        Panel("Engines that answer", {"{{engine}}": _of("pdkit_router_engine_healthy")}),
        Panel("Drained engines", {"{{engine}}": _of("pdkit_router_engine_drained")}),
    ),
)  # fmt: skip

BOARDS = {
    "overview": OVERVIEW, "engines": ENGINES, "kv": KV, "kv-server": KV_SERVER, "redis": REDIS,
    "router": FRONT,
}  # fmt: skip


def text_of(board: Board) -> str:
    """Return a dashboard as Grafana reads it."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .tags(["pdkit"])
        .refresh("10s")
        .time("now-30m", "now")
        .readonly()
        .with_variable(_variable("stack", "label_values(up, stack)"))
    )
    selection = _STACK
    if board.jobs:
        services = f'label_values(up{{{_STACK},job=~"{board.jobs}"}}, service)'
        made.with_variable(_variable("service", services).multi(True).include_all(True))
        selection = f"{_STACK},{_SERVICE}"
    for panel in board.panels:
        made.with_panel(_shown(panel, selection))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .query(query)
        .datasource(_PROMETHEUS)
        .refresh(VariableRefresh.ON_DASHBOARD_LOAD)
        .sort(VariableSort.NATURAL_ASC)
    )


def _shown(panel: Panel, selection: str) -> stat.Panel | timeseries.Panel:
    shown = (
        stat.Panel()
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        if panel.number
        else timeseries.Panel().min(0)
    )
    shown.title(panel.title).datasource(_PROMETHEUS).span(panel.span).height(_HEIGHT)
    if panel.unit:
        shown.unit(panel.unit)
    for ref_id, (legend, expression) in zip(_REF_IDS, panel.lines.items(), strict=False):
        query = prometheus.Dataquery().expr(expression.replace("{of}", selection))
        shown.with_target(query.legend_format(legend).ref_id(ref_id))
    return shown


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, board in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(text_of(board), encoding="utf-8")


if __name__ == "__main__":
    main()
