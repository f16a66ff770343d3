"""Causes that lie in what was asked, and by which way."""

from __future__ import annotations

from deploy.verify.diagnosis.evidence import Evidence, join
from deploy.verify.report import Diagnosis

# What vLLM answers where a log-probability is no number, which JSON cannot hold.
_NO_NUMBERS = "Out of range float values"


def short_prompts(evidence: Evidence) -> Diagnosis | None:
    """Prompts without a whole chunk, the user's own or any that the model has room for."""
    why = evidence.too_short or next((p.sentence for p in evidence.prompts if p.under_chunk), "")
    if not why:
        return None
    return Diagnosis(
        "prompt_under_chunk",
        f"{why}; only whole chunks are stored",
        "ask longer prompts, or set a smaller lmcache.chunk_size in deploy.yaml; "
        + evidence.restart_hint(),
    )


def prefix_cache_hides(evidence: Evidence) -> Diagnosis | None:
    """A consumer that needed no store, since it had answered the prompt's beginning before."""
    hidden = [prompt for prompt in evidence.prompts if prompt.hidden]
    if not hidden:
        return None
    said = join([f"{one.local} of {one.tokens} tokens in {one.consumer}" for one in hidden])
    return Diagnosis(
        "prefix_cache_hides",
        "the engine's own prefix cache served what would else have come from the store, since your "
        f"prompt was asked there before: {said}",
        "nothing needs fixing; to see the store serve it, change the prompt's first words, or "
        f"forget it: {evidence.restart_hint()}",
    )


def failed(evidence: Evidence) -> Diagnosis | None:
    """A service that answered something else than a completion."""
    broken = _without_numbers(evidence)  # by its KV, see `wrong_kv`
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
    """A router that forgets the prefill."""
    if not evidence.bypassed:
        return None
    return Diagnosis(
        "router_bypasses_producers",
        "the router answers without a prefill on a producer, so nothing is shared",
        f"deploy logs router --name {evidence.stack}; if somebody started it with other arguments: "
        + evidence.restart_hint(),
    )


def wrong_kv(evidence: Evidence) -> Diagnosis | None:
    """Answers that differ, or are none at all, where KV was loaded: a miss would not do that."""
    if evidence.mismatched:
        said = "answers over KV that was loaded differ from recomputed ones"
    elif without := _without_numbers(evidence):
        said = f"over KV that was loaded {join(without)} computed what is no number"
    else:
        return None
    return Diagnosis(
        "kv_differs",
        f"{said}: that KV is wrong",
        f"deploy down --name {evidence.stack}, and do not serve from it",
    )


def contradicts_itself(evidence: Evidence) -> Diagnosis | None:
    """An engine whose answer changes when its own prefix cache has the prompt."""
    if not evidence.contradicting:
        return None
    return Diagnosis(
        "self_differs",
        f"{join(sorted(evidence.contradicting))} answered a prompt from its own prefix cache "
        "otherwise than when it computed it, without the store: its KV memory is wrong",
        f"deploy down --name {evidence.stack}, and do not serve from it",
    )


def _without_numbers(evidence: Evidence) -> list[str]:
    """Return who said that its answer holds no numbers, where no producer said so of its own."""
    said = [name for name, answer in evidence.failed_requests.items() if _NO_NUMBERS in answer]
    computing = {engine.name for engine in evidence.engines if engine.role == "producer"}
    return [] if computing.intersection(said) else said


def not_found(evidence: Evidence) -> Diagnosis | None:
    """Nothing explains that something was missing."""
    if not evidence.missed:
        return None
    return Diagnosis(
        "not_found",
        "KV reached Redis and was not all found, though the engines agree in all that is compared"
        + (
            f"; {evidence.not_loaded:.0f} chunks were found and not loaded"
            if evidence.not_loaded
            else ""
        ),
        f"deploy logs {join(evidence.names[-1:])} --name {evidence.stack}, and look for LMCache's "
        "warnings",
    )


def unexplained(evidence: Evidence) -> Diagnosis | None:
    """What failed is all that is known."""
    if not evidence.failures:
        return None
    return Diagnosis(
        "unexplained",
        f"no rule explains this: {evidence.failures[0]}",
        f"deploy status --name {evidence.stack}; deploy logs --name {evidence.stack}",
    )
