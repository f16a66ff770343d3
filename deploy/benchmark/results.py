"""The result of a benchmark run: one folder with `result.json` and `requests.jsonl`.

Numbers per GPU or per engine are not stored: divide by `stack.units`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.benchmark.facts import Machine, ModelFacts, StackFacts, StrictModel, Versions
from deploy.errors import UsageError

FORMAT: Literal[1] = 1
RESULT_FILE = "result.json"
REQUESTS_FILE = "requests.jsonl"


class Workload(BaseModel):
    """What was sent: a workload's name and its parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str


class Slo(StrictModel):
    """Limits that a request must keep; null is no limit. The ITL is the mean of a request."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None


class Percentiles(StrictModel):
    """A distribution in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float


class HitTokens(StrictModel):
    """Prompt tokens by where their KV came from, counted by the engines over one repeat."""

    external: int = Field(description="consumers (of an aggregated stack: engines) loaded these")
    eligible: int | None = Field(
        description="a healthy stack loads at least these; null if engines share one cache, "
        "since what another engine has stored is not known"
    )
    local: int = Field(description="found in the engines' own prefix caches")
    computed: int = Field(description="prefilled by any engine")
    queried: int | None = Field(
        None,
        description="consumers (of an aggregated stack: engines) asked the store for these: all "
        "that they did not hold",
    )


def hit_rate(hits: Iterable[HitTokens], of: Literal["queried", "eligible"]) -> float | None:
    """Return the external hit rate, of what consumers asked for or of what was eligible."""
    known = [(one.external, tokens) for one in hits if (tokens := getattr(one, of)) is not None]
    total = sum(tokens for _, tokens in known)
    return sum(external for external, _ in known) / total if total else None


class RedisPathUse(StrictModel):
    """What the engines moved to and from Redis during one repeat."""

    stored_bytes: int
    loaded_bytes: int
    store_gb_s: float
    load_gb_s: float
    lookups: int
    lookup_ms: float
    failures: int = Field(description="failed calls to Redis")
    lost_chunks: int = Field(description="chunks that were not stored, not loaded or refused")
    barrier_waits: int
    barrier_wait_s: float
    late: int = Field(description="answers sent before their KV was stored")
    store_cpu_s: float | None = Field(None, description="CPU time of the threads that store values")
    load_cpu_s: float | None = Field(None, description="CPU time of the threads that load values")
    ranks: int = Field(
        1, description="ranks of an engine that store and load side by side, each at these speeds"
    )
    by_server: bool = Field(False, description="LMCache's server moved it, for all engines")


class GpuUse(StrictModel):
    """A GPU during one repeat; null is what its driver does not report."""

    utilization: float | None = Field(description="mean share of the time in which it computed")
    peak_memory_bytes: int | None = Field(description="in use at once, by all processes")


class Usage(StrictModel):
    """CPU time and memory by service, and the GPUs by index, during one repeat."""

    cpu_s: dict[str, float]
    peak_rss_bytes: dict[str, int]
    gpu: dict[str, GpuUse] | None = Field(None, description="null if unknown for all")


class Repeat(StrictModel):
    """One measured pass of the workload.

    Attributes:
        rate: requests offered per second; null in a closed loop.
        concurrency: requests in flight; null in an open loop.
        stages: mean seconds of a request by the engines' role and stage. The engines count queue,
            prefill and decode. What a request waits for Redis, lookup and load, lies within
            prefill. store is how long the store barrier holds its answer back afterwards.
        connector: the share of the time of engines' steps that the connector took, by role.
    """

    index: int
    rate: float | None
    concurrency: int | None
    duration_s: float
    warmup_s: float
    sent: int
    completed: int
    failed: int
    errors: dict[str, int]
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    within_slo: float | None = Field(description="share of all requests sent; null without SLO")
    goodput_per_s: float | None = Field(description="requests per second within the SLO")
    hits: HitTokens | None
    redis_path: RedisPathUse | None
    usage: Usage | None
    stages: dict[str, dict[str, float]] = Field(default_factory=dict)
    connector: dict[str, float] = Field(default_factory=dict)


class RateStep(StrictModel):
    """One rate that the search tried."""

    rate: float
    within_slo: float
    held: bool


class RateSearch(StrictModel):
    """The highest rate that holds the SLO; null if no rate that was tried holds it."""

    required_share: float
    highest_rate: float | None
    low: float | None = Field(
        description="95 % interval of highest_rate; null where no rate tried is an end"
    )
    high: float | None
    steps: list[RateStep]


class RouterThroughput(StrictModel):
    """Short requests per second by the router, and by the engines themselves."""

    in_flight: int = Field(description="requests in flight, both ways")
    routed_per_s: float = Field(description="by the router; the median of a few rounds")
    direct_per_s: float = Field(description="by a client that asks the same engines itself")

    @property
    def share(self) -> float:
        """What is left of the engines' throughput."""
        return self.routed_per_s / self.direct_per_s


class Result(StrictModel):
    """One run of `deploy bench`."""

    format: Literal[1] = FORMAT
    kind: Literal["run"] = "run"
    started: str = Field(description="UTC, ISO 8601")
    command: list[str]
    seed: int
    machine: Machine
    versions: Versions
    model: ModelFacts
    stack: StackFacts
    workload: Workload
    slo: Slo | None
    repeats: list[Repeat]
    rate_search: RateSearch | None = None
    one_user: Repeat | None = Field(
        None, description="the same workload, one request at a time; null if it was not measured"
    )
    hop_s: Percentiles | None = Field(None, description="what the router adds to a short request")
    router_throughput: RouterThroughput | None = Field(
        None, description="null if it was not measured, or a request failed"
    )
    up_extra_s: float | None = Field(
        None,
        description="what `deploy up` took beyond its slowest engine's own start, "
        "its check included if it made one; null where an engine was started again since",
    )
    interrupted: bool = Field(False, description="Ctrl-C ended it; the finished repeats are here")


class RequestRecord(StrictModel):
    """One request; a line of `requests.jsonl`.

    Attributes:
        arrival_s: when it was sent, after the repeat's start.
        itl_s: the gap before each output token but the first, rounded to 10 µs.
        ttft_s: null if no token arrived.
    """

    repeat: int
    index: int
    arrival_s: float
    ttft_s: float | None
    itl_s: list[float]
    e2e_s: float
    input_tokens: int
    output_tokens: int
    error: str | None = None
    conversation: int | None = None


def write_result(folder: Path, result: Result) -> Path:
    """Replace the folder's result in one step, and return its file."""
    return write_document(folder / RESULT_FILE, result)


def write_document(file: Path, document: StrictModel) -> Path:
    """Replace a file by a document in one step, and return it."""
    draft = file.with_suffix(".tmp")
    draft.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return draft.replace(file)


def append_requests(folder: Path, records: Iterable[RequestRecord]) -> None:
    """Add a repeat's requests to the folder."""
    with (folder / REQUESTS_FILE).open("a", encoding="utf-8") as file:
        file.writelines(record.model_dump_json() + "\n" for record in records)


def read_result(folder: Path) -> Result:
    """Return the result in a folder, or of a `result.json`.

    Raises:
        UsageError: there is none, or this version of pdkit cannot read it.
    """
    file = folder if folder.suffix == ".json" else folder / RESULT_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
            raise UsageError(
                f"{file} was written by a newer pdkit", hint="use that version of pdkit"
            )
        return Result.model_validate(raw)
    except OSError as exc:
        raise UsageError(
            f"{file}: {exc.strerror}", hint="deploy bench, which writes a result"
        ) from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise UsageError(
            f"{file} is not a benchmark result: {where}: {first['msg']}",
            hint="deploy bench, which writes a result",
        ) from exc
    except ValueError as exc:
        raise UsageError(
            f"{file} is not a benchmark result: {exc}", hint="deploy bench, which writes a result"
        ) from exc


def read_requests(folder: Path) -> Iterator[RequestRecord]:
    """Yield the requests of a result's folder; none if they were not kept."""
    file = folder / REQUESTS_FILE
    if file.is_file():
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                yield RequestRecord.model_validate_json(line)
