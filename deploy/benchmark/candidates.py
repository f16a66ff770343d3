"""Which topologies fit on a number of GPUs, or of engines on processors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.config.spec import TOPOLOGY_FORM
from deploy.errors import UsageError
from deploy.planning.topology import Topology, aggregated, parse_topology

_NAMED = re.compile(r"(?P<form>[^:]+)(?::tp(?P<tp>[1-9][0-9]?))?")


@dataclass(frozen=True)
class Candidate:
    """A topology and the tensor-parallel size of its engines."""

    topology: Topology
    tp: int = 1

    @property
    def units(self) -> int:
        """How many GPUs it takes; on processors, engines."""
        return self.topology.engines * self.tp

    @property
    def plain(self) -> bool:
        """Whether its engines are plain ones, which share no KV."""
        return not self.topology.redis

    @property
    def name(self) -> str:
        """The name by which `--topologies` and results know it, such as 2p1d or 2a:tp2."""
        return f"{self.topology}:tp{self.tp}" if self.tp > 1 else str(self.topology)


def feasible(units: int, *, has_gpus: bool) -> tuple[Candidate, ...]:
    """Return every split of the engines that fit on the GPUs, and the aggregated baselines.

    Engines on processors have one rank each.
    """
    sizes = [tp for tp in range(1, units + 1) if units % tp == 0] if has_gpus else [1]
    return tuple(Candidate(topology, tp) for tp in sizes for topology in _topologies(units // tp))


def _topologies(engines: int) -> list[Topology]:
    shared = [aggregated(engines, redis=True)] if engines > 1 else []
    splits = [Topology(count, engines - count) for count in range(1, engines)]
    return [aggregated(engines), *shared, *splits]


def named(text: str, tp: int = 1) -> tuple[Candidate, ...]:
    """Return the candidates of a list such as `1p2d,3a,2a:tp2`.

    Raises:
        UsageError: a name is not a topology, or is repeated.
    """
    found: list[Candidate] = []
    for name in text.split(","):
        match = _NAMED.fullmatch(name.strip())
        if match is None or not re.fullmatch(TOPOLOGY_FORM, match["form"]):
            raise UsageError(
                f"--topologies: '{name.strip()}' is not a topology",
                hint="deploy bench sweep --topologies 1p1d,1p2d,2a,2a+redis",
            )
        one = Candidate(parse_topology(match["form"]), int(match["tp"] or tp))
        if one in found:
            raise UsageError(
                f"--topologies: {one.name} is named twice", hint="name each topology once"
            )
        found.append(one)
    return tuple(found)


def winning_spec(asked: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    """Return the lines of a stack file for a candidate topology and the user's options."""
    split: dict[str, Any] = {"topology": str(candidate.topology)}
    if candidate.tp > 1:
        split["tp"] = candidate.tp
    return {**without_split(asked, plain=candidate.plain), **split}


_SPLIT = ("gpus", "topology", "producers", "consumers", "tp")
_SHARED_KV = ("connector", "layerwise", "save_decode_cache", "redis")


def without_split(asked: Mapping[str, Any], *, plain: bool) -> dict[str, Any]:
    """Return the settings of a stack but its split; for plain engines, none on sharing KV."""
    dropped: Sequence[str] = (*_SPLIT, *(_SHARED_KV if plain else ()))
    return {field: value for field, value in asked.items() if field not in dropped}
