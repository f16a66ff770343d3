"""What a result says about the machine, the software and the stack."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class StrictModel(BaseModel):
    """A model that refuses fields it does not know."""

    # An unknown field is a mistake.
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(StrictModel):
    """The machine that the stack ran on."""

    processor: str
    cores: int
    memory_gib: float
    gpus: list[str]
    load_1m: float = Field(description="the load average when the run started")
    os: str
    python: str


class Versions(StrictModel):
    """The software that was measured; null if unknown."""

    pdkit: str
    vllm: str | None
    lmcache: str | None
    redis: str | None
    router: str | None
    generator: str


class ModelFacts(StrictModel):
    """The model that the stack serves."""

    name: str
    dtype: str
    kv_bytes_a_token: int | None
    context: int = Field(description="tokens of prompt and answer together")


class StackFacts(StrictModel):
    """The stack that was loaded."""

    vendor: str
    runtime: str
    topology: str = Field(description="1p2d is one producer, two consumers; 3a is aggregated")
    tp: int
    engines: int
    gpus: int = Field(description="GPUs of all engines; 0 on CPUs")
    redis: bool
    shards: int
    chunk_size: int

    @property
    def unit(self) -> str:
        """The unit that numbers of stacks are divided by: GPUs, or engines on CPUs."""
        return "GPU" if self.gpus else "engine"

    @property
    def units(self) -> int:
        """How many of these the stack has."""
        return self.gpus or self.engines
