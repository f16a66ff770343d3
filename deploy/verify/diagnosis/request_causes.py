"""Causes in the requests and in how they are routed."""

from __future__ import annotations

from deploy.verify.diagnosis.evidence import Evidence, join
from deploy.verify.report import Diagnosis

# vLLM's answer when a log-probability is NaN or infinite, which JSON cannot hold.
_NO_NUMBERS = "Out of range float values"


def short_prompts(evidence: Evidence) -> Diagnosis | None:
    """Prompts shorter than a chunk: the user's own, or all that the model allows."""
    why = evidence.too_short or next((p.sentence for p in evidence.prompts if p.under_chunk), "")
    if not why:
        return None
    return Diagnosis(
        "prompt_under_chunk",
        f"{why}; only whole chunks are stored",
        "send longer prompts, or set a smaller lmcache.chunk_size in deploy.yaml; "
        + evidence.restart_hint(),
    )


def prefix_cache_hides(evidence: Evidence) -> Diagnosis | None:
    """A consumer that did not need the store, as its prefix cache has the prompt's start."""
    hidden = [prompt for prompt in evidence.prompts if prompt.hidden]
    if not hidden:
        return None
    said = join([f"{one.local} of {one.tokens} tokens in {one.consumer}" for one in hidden])
    return Diagnosis(
        "prefix_cache_hides",
        "the engine's own prefix cache served the prompt instead of the store, because it was sent "
        f"there before: {said}",
        "nothing needs fixing; to load it from the store, change the prompt's first words, or "
        f"restart: {evidence.restart_hint()}",
    )


def failed(evidence: Evidence) -> Diagnosis | None:
    """A service that did not answer with a completion."""
    broken = _without_numbers(evidence)  # because of wrong KV, see `wrong_kv`
    failed = [one for one in evidence.failed_requests.items() if one[0] not in broken]
    if not failed:
        return None
    engine, answer = failed[0]
    return Diagnosis(
        "request_failed",
        f"{engine} did not answer: {answer}",
        f"deploy logs {engine} --name {evidence.stack}",
    )


def router(evidence: Evidence) -> Diagnosis | None:
    """A router that skips the prefill."""
    if not evidence.bypassed:
        return None
    return Diagnosis(
        "router_bypasses_producers",
        "the router answers without a prefill on a producer, so no KV is reused",
        f"deploy logs router --name {evidence.stack}; if it was started with other arguments: "
        + evidence.restart_hint(),
    )


def wrong_kv(evidence: Evidence) -> Diagnosis | None:
    """Answers from loaded KV that differ or hold no numbers; a miss does not cause that."""
    if evidence.mismatched:
        said = "answers from loaded KV differ from recomputed ones"
    elif without := _without_numbers(evidence):
        said = f"from loaded KV, {join(without)} computed NaN or infinite values"
    else:
        return None
    return Diagnosis(
        "kv_differs",
        f"{said}: the loaded KV is wrong",
        f"deploy down --name {evidence.stack}, and do not serve from this stack",
    )


def stale_kv(evidence: Evidence) -> Diagnosis | None:
    """KV of an earlier check gives another answer than a fresh computation."""
    if not evidence.stale:
        return None
    return Diagnosis("stale_kv", evidence.stale, evidence.emptying)


def contradicts_itself(evidence: Evidence) -> Diagnosis | None:
    """An engine whose answer changes when its own prefix cache serves the prompt."""
    if not evidence.contradicting:
        return None
    return Diagnosis(
        "self_differs",
        f"{join(sorted(evidence.contradicting))} answered a prompt from its own prefix cache "
        "differently than by computing it, without the store: its KV memory is wrong",
        f"deploy down --name {evidence.stack}, and do not serve from this stack",
    )


def _without_numbers(evidence: Evidence) -> list[str]:
    """Return the engines whose answers hold no numbers, unless a producer is among them."""
    said = [name for name, answer in evidence.failed_requests.items() if _NO_NUMBERS in answer]
    computing = {engine.name for engine in evidence.engines if engine.role != "consumer"}
    return [] if computing.intersection(said) else said


def not_found(evidence: Evidence) -> Diagnosis | None:
    """Misses without any other explanation."""
    if not evidence.missed:
        return None
    return Diagnosis(
        "not_found",
        f"{_found_in(evidence.store.name)}, although all compared settings agree"
        + (
            f"; {evidence.not_loaded:.0f} chunks were found but not loaded"
            if evidence.not_loaded
            else ""
        ),
        f"deploy logs {join(evidence.names[-1:])} --name {evidence.stack}, and look for LMCache's "
        "warnings",
    )


def _found_in(store: str) -> str:
    if store == "Redis":
        return "KV reached Redis but not all of it was found"
    return f"not all KV was found in {store}; whether it was stored is unknown"


def unexplained(evidence: Evidence) -> Diagnosis | None:
    """Failures that no rule explains."""
    if not evidence.failures:
        return None
    return Diagnosis(
        "unexplained",
        f"the cause is unknown: {evidence.failures[0]}",
        f"deploy status --name {evidence.stack}; deploy logs --name {evidence.stack}",
    )
