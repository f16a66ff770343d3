"""Causes that lie in how the engines run: what each is, and in what they do not agree."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.verify.diagnosis.evidence import CONNECTOR, EngineFacts, Evidence, join
from deploy.verify.report import Diagnosis

# What keys do not say and bytes depend on, by the words for it. Engines whose other facts differ
# differ in some of these, too.
_LAYOUT = {
    "dtype": "element type",
    "layers": "layers",
    "planes": "planes (K, V)",
    "heads": "heads of a worker",
    "head_size": "head size",
    "layerwise": "layerwise",
    "layout": "layout digest",
    "client": "client of Redis",
}


def connector(evidence: Evidence) -> Diagnosis | None:
    """Engines whose KV the kit's connector does not move."""
    wrong = {engine.name: _instead(engine) for engine in evidence.engines if not engine.patched}
    if not wrong:
        return None
    said = "; ".join(f"{name} runs {what}" for name, what in wrong.items())
    return Diagnosis(
        "connector_not_loaded",
        f"{said}, instead of the patched connector {CONNECTOR}",
        "take --kv-transfer-config out of engine.args in deploy.yaml, if it is there; "
        + evidence.restart_hint(),
    )


def _instead(engine: EngineFacts) -> str:
    if engine.use_native:
        return f"{engine.connector or 'LMCache'} with use_native, vLLM's own copy of the adapter"
    return f"vLLM's {engine.connector}" if engine.connector else "no KV connector"


def fixes(evidence: Evidence) -> Diagnosis | None:
    """Fixes that a bug needs, and that did not take."""
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
        "take PDKIT_DISABLE_FIXES out of engine.env in deploy.yaml"
        if evidence.disabled_by_spec
        else "unset PDKIT_DISABLE_FIXES"
    )
    return Diagnosis(
        "fix_not_applied",
        f"the connector cannot move KV as it should: {said}",
        f"{unset}; {evidence.restart_hint()}",
    )


def hash_seeds(evidence: Evidence) -> Diagnosis | None:
    """PYTHONHASHSEED, from which the hash of every first chunk starts."""
    by_seed: dict[str, list[str]] = {}
    for engine in evidence.engines:
        if not engine.ended:  # what has ended has no environment to look at
            by_seed.setdefault(engine.hash_seed, []).append(engine.name)
    if len(by_seed) < 2 and "" not in by_seed:
        return None
    said = "; ".join(
        f"{join(engines)} {'has none' if not seed else f'has {seed}'}"
        for seed, engines in by_seed.items()
    )
    return Diagnosis(
        "hash_seed_differs",
        f"PYTHONHASHSEED is not the same in all engines, so their keys never match: {said}",
        f"take PYTHONHASHSEED away from whatever starts the engine; {evidence.restart_hint()}",
    )


def hash_algorithm(evidence: Evidence) -> Diagnosis | None:
    """What chunks are hashed with, and what that hash starts from in spite of equal seeds."""
    for name, what in (
        ("hash_algorithm", "hash chunks in different ways"),
        ("hash_root", "begin the hashes of chunks with different numbers"),
    ):
        if said := _apart(evidence, name):
            return Diagnosis(
                "hash_algorithm_differs",
                f"engines {what}, so their keys never match: {said}",
                _settings_hint(evidence, "pre_caching_hash_algorithm"),
            )
    return None


def chunk_size(evidence: Evidence) -> Diagnosis | None:
    """Engines that cut prompts elsewhere; what was planned has a say, too."""
    sizes = {e.name: e.kv["chunk_size"] for e in evidence.engines if e.kv.get("chunk_size")}
    if not sizes or set(sizes.values()) <= {evidence.chunk_size}:
        return None
    return Diagnosis(
        "chunk_size_differs",
        "engines cut prompts into chunks of different sizes, so their keys never match: "
        f"{_said(sizes)}; planned are {evidence.chunk_size} tokens",
        _settings_hint(evidence, "chunk_size"),
    )


def tensor_parallel(evidence: Evidence) -> Diagnosis | None:
    """Engines with different numbers of workers, each of which stores its share of the heads."""
    if not (said := _apart(evidence, "world_size")):
        return None
    return Diagnosis(
        "tp_differs",
        "engines are spread over different numbers of workers, whose number is part of every "
        f"key: {said}",
        "take --tensor-parallel-size and --pipeline-parallel-size out of engine.args in "
        f"deploy.yaml and set tp there; {evidence.restart_hint()}",
    )


def model(evidence: Evidence) -> Diagnosis | None:
    """The name or path of the model, as it stands in every key."""
    if not (said := _apart(evidence, "model")):
        return None
    return Diagnosis(
        "model_differs",
        "engines were given the model under different names, each of which is part of its keys: "
        + said,
        f"take --model out of engine.args in deploy.yaml and set model there; "
        f"{evidence.restart_hint()}",
    )


def redis_address(evidence: Evidence) -> Diagnosis | None:
    """Engines that were sent to different servers or databases."""
    if not (said := _apart(evidence, "redis")):
        return None
    return Diagnosis(
        "store_differs",
        f"engines use different Redis servers or databases: {said}",
        "take LMCACHE_REMOTE_URL and LMCACHE_EXTRA_CONFIG out of engine.env in deploy.yaml; "
        + evidence.restart_hint(),
    )


def namespace(evidence: Evidence) -> Diagnosis | None:
    """Engines whose keys begin differently in the same Redis."""
    if not (said := _apart(evidence, "namespace")):
        return None
    return Diagnosis(
        "namespace_differs",
        f"engines keep their KV in different name spaces of Redis: {said}",
        "take LMCACHE_EXTRA_CONFIG out of engine.env in deploy.yaml; " + evidence.restart_hint(),
    )


def layout(evidence: Evidence) -> Diagnosis | None:
    """Engines whose chunks are made of other bytes."""
    apart = {words: _apart(evidence, name) for name, words in _LAYOUT.items()}
    found = {words: said for words, said in apart.items() if said}
    if not found:
        return None
    if len(found) > 1:
        found.pop(_LAYOUT["layout"], None)  # it follows from the others
    return Diagnosis(
        "layout_differs",
        "KV means different bytes in the engines, so none reads another's: "
        + "; ".join(f"{words}: {said}" for words, said in found.items()),
        "give all engines the same dtype, model and LMCache settings (engine.args and engine.env "
        f"in deploy.yaml are for all of them); {evidence.restart_hint()}",
    )


def ended(evidence: Evidence) -> Diagnosis | None:
    """Engines that did not live through the check."""
    died = [engine for engine in evidence.engines if engine.ended or engine.restarted]
    if not died:
        return None
    anew = [engine.name for engine in died if engine.restarted]
    name, what = died[0].name, join([engine.name for engine in died])
    if anew:
        return Diagnosis(
            "engine_restarted",
            f"{what} ended during the check, and {join(anew)} was started anew; what an engine was "
            "asked meanwhile is lost",
            f"deploy logs {name} --name {evidence.stack}",
        )
    return Diagnosis(
        "engine_died",
        f"{what} ended during the check",
        f"deploy logs {name} --name {evidence.stack}; deploy up --resume --name {evidence.stack}",
    )


def bad_pair(evidence: Evidence) -> Diagnosis | None:
    """Versions of vLLM and LMCache of which it is known that they do not go together."""
    if not evidence.bad_pair:
        return None
    return Diagnosis(
        "known_bad_pair",
        f"these engines run a pair that is known to be broken: {evidence.bad_pair}",
        f"deploy images list; deploy swap --image PROFILE --name {evidence.stack}",
    )


def _apart(evidence: Evidence, name: str) -> str:
    """Return who says what of a fact on which engines do not agree; "" where they agree."""
    told = {e.name: e.kv[name] for e in evidence.engines if e.kv.get(name) is not None}
    return _said(told) if len({str(value) for value in told.values()}) > 1 else ""


def _said(told: Mapping[str, object]) -> str:
    by_value: dict[str, list[str]] = {}
    for name, value in told.items():
        by_value.setdefault(str(value), []).append(name)
    return "; ".join(f"{join(names)} {value}" for value, names in by_value.items())


def _settings_hint(evidence: Evidence, setting: str) -> str:
    return (
        f"take LMCACHE_{setting.upper()} out of engine.env in deploy.yaml, if it is there; "
        + evidence.restart_hint()
    )
