"""Causes in the engines: how each runs, and where their settings differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.verify.diagnosis.evidence import CONNECTOR, EngineFacts, Evidence, join, said_by
from deploy.verify.report import Diagnosis

# Properties that keys do not contain but bytes depend on, with their names in messages. Engines
# that differ in other facts usually differ in some of these, too.
_LAYOUT = {
    "dtype": "element type",
    "layers": "layers",
    "planes": "planes (K, V)",
    "heads": "heads of a worker",
    "head_size": "head size",
    "layerwise": "layerwise",
    "layout": "layout digest",
    "client": "Redis client",
}


def connector(evidence: Evidence) -> Diagnosis | None:
    """Engines without pdkit's connector."""
    wrong = {engine.name: _instead(engine) for engine in evidence.engines if not engine.patched}
    if not wrong:
        return None
    said = "; ".join(f"{name} runs {what}" for name, what in wrong.items())
    return Diagnosis(
        "connector_not_loaded",
        f"{said}, instead of the patched connector {CONNECTOR}",
        "remove --kv-transfer-config from engine.args in deploy.yaml, if set; "
        + evidence.restart_hint(),
    )


def _instead(engine: EngineFacts) -> str:
    if engine.use_native:
        return f"{engine.connector or 'LMCache'} with use_native, vLLM's own copy of the adapter"
    return f"vLLM's {engine.connector}" if engine.connector else "no KV connector"


def fixes(evidence: Evidence) -> Diagnosis | None:
    """Needed fixes that are not applied."""
    off: dict[str, list[str]] = {}
    for engine in evidence.engines:
        if not engine.fixes and engine.unknown:
            off.setdefault("no report of the patched connector", []).append(engine.name)
        for fix, state in engine.fixes.items():
            if state in ("disabled", "failed") and engine.patched:
                off.setdefault(f"fix {fix} is {state}", []).append(engine.name)
    if not off:
        return None
    said = "; ".join(f"{what} in {join(engines)}" for what, engines in off.items())
    unset = (
        "remove PDKIT_DISABLE_FIXES from engine.env in deploy.yaml"
        if evidence.disabled_by_spec
        else "unset PDKIT_DISABLE_FIXES"
    )
    return Diagnosis(
        "fix_not_applied",
        f"the connector cannot move KV correctly: {said}",
        f"{unset}; {evidence.restart_hint()}",
    )


def hash_seeds(evidence: Evidence) -> Diagnosis | None:
    """PYTHONHASHSEED, the start of the hash of every first chunk."""
    by_seed: dict[str, list[str]] = {}
    for engine in evidence.engines:
        # A dead engine has no environment to read; another host's has none that is seen here.
        if not engine.ended and engine.hash_seed is not None:
            by_seed.setdefault(engine.hash_seed, []).append(engine.name)
    if len(by_seed) < 2 and "" not in by_seed:
        return None
    said = "; ".join(
        f"{join(engines)} {'has none' if not seed else f'has {seed}'}"
        for seed, engines in by_seed.items()
    )
    return Diagnosis(
        "hash_seed_differs",
        f"PYTHONHASHSEED differs between engines, so their keys never match: {said}",
        f"unset PYTHONHASHSEED in whatever starts the engine; {evidence.restart_hint()}",
    )


def hash_algorithm(evidence: Evidence) -> Diagnosis | None:
    """The hash algorithm of chunks, and its start value despite equal seeds."""
    for name, what in (
        ("hash_algorithm", "hash chunks with different algorithms"),
        ("hash_root", "start the hashes of chunks from different numbers"),
    ):
        if said := _apart(evidence, name):
            return Diagnosis(
                "hash_algorithm_differs",
                f"engines {what}, so their keys never match: {said}",
                _settings_hint(evidence, "pre_caching_hash_algorithm"),
            )
    return None


def chunk_size(evidence: Evidence) -> Diagnosis | None:
    """Engines whose chunk size differs from the others or from the plan."""
    sizes = {e.name: e.kv["chunk_size"] for e in evidence.engines if e.kv.get("chunk_size")}
    if not sizes or set(sizes.values()) <= {evidence.chunk_size}:
        return None
    return Diagnosis(
        "chunk_size_differs",
        "engines cut prompts into chunks of different sizes, so their keys never match: "
        f"{said_by(sizes)}; the plan says {evidence.chunk_size} tokens",
        _settings_hint(evidence, "chunk_size"),
    )


def _differs(code: str, fact: str, what: str, fix: str) -> Callable[[Evidence], Diagnosis | None]:
    """Return the rule for a fact in which all engines must agree."""

    def rule(evidence: Evidence) -> Diagnosis | None:
        if not (said := _apart(evidence, fact)):
            return None
        return Diagnosis(code, f"{what}: {said}", f"{fix}; {evidence.restart_hint()}")

    return rule


# Each worker stores its share of the heads.
tensor_parallel = _differs(
    "tp_differs", "world_size",
    "engines run with different numbers of workers, which is part of every key, so their keys "
    "never match",
    "remove --tensor-parallel-size and --pipeline-parallel-size from engine.args in deploy.yaml "
    "and set tp instead",
)  # fmt: skip
model = _differs(
    "model_differs", "model",
    "engines run different models, and the content of the model's files is part of every key, so "
    "their keys never match",
    "remove --model from engine.args in deploy.yaml and set model instead",
)  # fmt: skip


# Rows of an engine's identity that other causes name.
_NAMED_ELSEWHERE = frozenset({"model", "tensor_parallel", "dtype", "shape"})


def identity(evidence: Evidence) -> Diagnosis | None:
    """Engines that run something else than the others, such as another vLLM."""
    serving = {engine.name: engine.kv for engine in evidence.engines if not engine.ended}
    apart = [
        one.text for one in rows_apart(serving) if not one.alike and one.row not in _NAMED_ELSEWHERE
    ]
    if not apart:
        return None
    return Diagnosis(
        "engine_differs",
        "engines differ in what they run, so each finds no KV of the others: " + "; ".join(apart),
        evidence.restart_hint(),
    )


@dataclass(frozen=True)
class RowApart:
    """A row of identity that differs between engines, or from the plan.

    Attributes:
        text: what each engine runs, and what was planned, if an engine knows.
        alike: all engines run the same.
    """

    row: str
    text: str
    alike: bool


def rows_apart(reports: Mapping[str, Mapping[str, Any]]) -> list[RowApart]:
    """Return the rows in which engines differ from each other or from the plan."""
    every = {name: rows for name, kv in reports.items() if (rows := _mapping(kv, "rows"))}
    planned = {
        row: value for kv in reports.values() for row, value in _mapping(kv, "unplanned").items()
    }
    found: list[RowApart] = []
    for row in dict.fromkeys(row for rows in every.values() for row in rows):
        values = {name: str(rows.get(row, "unknown")) for name, rows in every.items()}
        alike = len(set(values.values())) == 1
        if not alike or row in planned:
            text = f"{row}: {said_by(values)}"
            text += f" ({planned[row]} was planned)" if row in planned else ""
            found.append(RowApart(row, text, alike))
    return found


def _mapping(kv: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = kv.get(name)
    return value if isinstance(value, Mapping) else {}


redis_address = _differs(
    "store_differs", "redis",
    "engines use different Redis servers or databases",
    "remove LMCACHE_REMOTE_URL and LMCACHE_EXTRA_CONFIG from the environment of the image, or of "
    "what starts the engines",
)  # fmt: skip
namespace = _differs(
    "namespace_differs", "namespace",
    "engines use different key namespaces in Redis",
    "remove LMCACHE_EXTRA_CONFIG from the environment of the image, or of what starts the engines",
)  # fmt: skip


def layout(evidence: Evidence) -> Diagnosis | None:
    """Engines whose chunks have different byte layouts."""
    apart = {words: _apart(evidence, name) for name, words in _LAYOUT.items()}
    found = {words: said for words, said in apart.items() if said}
    if not found:
        return None
    if len(found) > 1:
        found.pop(_LAYOUT["layout"], None)  # it follows from the others
    return Diagnosis(
        "layout_differs",
        "the byte layout of KV differs between engines, so they cannot read each other's KV: "
        + "; ".join(f"{words}: {said}" for words, said in found.items()),
        "give all engines the same dtype, model and LMCache settings (engine.args and engine.env "
        f"in deploy.yaml apply to all of them); {evidence.restart_hint()}",
    )


def ended(evidence: Evidence) -> Diagnosis | None:
    """Engines that exited during the check."""
    died = [engine for engine in evidence.engines if engine.ended or engine.restarted]
    if not died:
        return None
    anew = [engine.name for engine in died if engine.restarted]
    name, what = died[0].name, join([engine.name for engine in died])
    if anew:
        return Diagnosis(
            "engine_restarted",
            f"{what} exited during the check, and {join(anew)} was restarted; requests are lost",
            f"deploy logs {name} --name {evidence.stack}",
        )
    return Diagnosis(
        "engine_died",
        f"{what} exited during the check",
        f"deploy logs {name} --name {evidence.stack}; deploy up --resume --name {evidence.stack}",
    )


def bad_pair(evidence: Evidence) -> Diagnosis | None:
    """Versions of vLLM and LMCache that are known not to work together."""
    if not evidence.bad_pair:
        return None
    return Diagnosis(
        "known_bad_pair",
        f"the engines run a pair of versions that is known to be broken: {evidence.bad_pair}",
        f"deploy images list; deploy swap --image PROFILE --name {evidence.stack}",
    )


def _apart(evidence: Evidence, name: str) -> str:
    """Return each engine's value of a fact in which they differ; "" if they agree."""
    told = {e.name: e.kv[name] for e in evidence.engines if e.kv.get(name) is not None}
    return said_by(told) if len({str(value) for value in told.values()}) > 1 else ""


def _settings_hint(evidence: Evidence, setting: str) -> str:
    return (
        f"remove LMCACHE_{setting.upper()} from the environment of the image, or of what starts "
        "the engines, if set; " + evidence.restart_hint()
    )
