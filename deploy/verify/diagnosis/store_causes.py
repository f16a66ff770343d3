"""Causes in Redis, or between Redis and the engines."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.verify.diagnosis.evidence import Evidence, join
from deploy.verify.report import Diagnosis

# Redis error codes by kind, as engines and Redis count them.
_FULL = {"oom"}
_READ_ONLY = {"readonly"}
_DENIED = {"noperm", "noauth", "wrongpass", "auth"}
# Covered by other rules.
_TOLD = _FULL | _READ_ONLY | _DENIED


def unreachable(evidence: Evidence) -> Diagnosis | None:
    """Redis, or LMCache's server, does not answer."""
    if evidence.store.reachable or evidence.store.refusal:
        return None
    return Diagnosis(
        "store_unreachable",
        f"{evidence.store.name} does not answer, so nothing can be stored or found",
        f"start the Redis of redis.url_file or correct its URL, then deploy status --name "
        f"{evidence.stack}"
        if evidence.store.user_supplied
        else f"deploy logs {evidence.store.services[0]} --name {evidence.stack}"
        + _started_again(evidence),
    )


def _started_again(evidence: Evidence) -> str:
    """Return the command that starts LMCache's server again; "" if the stack has none."""
    if evidence.server is None:
        return ""
    command = "up --resume" if evidence.store.restarted else f"restart {evidence.server.name}"
    return f"; deploy {command} --name {evidence.stack}"


def denied(evidence: Evidence) -> Diagnosis | None:
    """Redis refuses its user, or a command that is needed."""
    if not evidence.kinds_failed() & _DENIED and not evidence.store.denied:
        return None
    said = evidence.store.refusal or _words(evidence, _DENIED)
    return Diagnosis(
        "store_denied",
        f"Redis refuses the stack's user or password: {said}",
        "allow that user GET, SET, GETRANGE, STRLEN and UNLINK on the stack's keys "
        f"(ACL SETUSER), or correct redis.url_file; deploy up --resume --name {evidence.stack}"
        if evidence.store.user_supplied
        else "the users of pdkit's Redis were changed (ACL LIST shows them); "
        + evidence.restart_hint(),
    )


def read_only(evidence: Evidence) -> Diagnosis | None:
    """Redis is a read-only replica."""
    if not evidence.kinds_failed() & _READ_ONLY:
        return None
    return Diagnosis(
        "store_read_only",
        "Redis is a read-only replica of another server, so nothing can be stored: "
        + _words(evidence, _READ_ONLY),
        "name the master, a Sentinel or the cluster in redis.url_file; "
        f"deploy up --resume --name {evidence.stack}"
        if evidence.store.user_supplied
        else f"pdkit's Redis was made a replica: {evidence.restart_hint()}",
    )


def full(evidence: Evidence) -> Diagnosis | None:
    """Redis is full and may not evict."""
    if not evidence.kinds_failed() & _FULL:
        return None
    if evidence.store.evicted and evidence.store.memory.evicts_kv:
        return None  # it evicts, but is too small: see `evicts`
    limit = evidence.store.memory.limit_mib
    size = f" (maxmemory {limit})" if limit else ""
    policy = (
        f" and its maxmemory-policy is {evidence.store.policy}" if evidence.store.policy else ""
    )
    return Diagnosis(
        "store_full",
        f"Redis is full{size}{policy}, so nothing more is stored: " + _words(evidence, _FULL),
        "redis-cli CONFIG SET maxmemory-policy allkeys-lru, or raise maxmemory of that Redis"
        if evidence.store.user_supplied
        else f"raise redis.memory_gib in deploy.yaml; {evidence.restart_hint()}",
    )


def lost_keys(evidence: Evidence) -> Diagnosis | None:
    """Keys lost to a flush, a restart or a deletion."""
    if evidence.store.restarted:
        how = "was restarted" if evidence.store.name == "Redis" else "ended"
        what = f"{evidence.store.name} {how} during the check and lost its keys"
    elif evidence.store.flushes:
        what = f"Redis was flushed during the check ({evidence.store.flushes} times)"
    elif evidence.vanished and not evidence.store.evicted:
        what = f"another client deleted {evidence.vanished} keys of the check's chunks from Redis"
    else:
        return None
    return Diagnosis(
        "keys_lost",
        f"{what}, after a prefill stored KV and before its decode read it",
        f"deploy check --name {evidence.stack}, without flushing or restarting "
        f"{evidence.store.name} meanwhile",
    )


def evicts(evidence: Evidence) -> Diagnosis | None:
    """Keys that Redis evicted before they were read.

    Evicting keys that are no longer read is normal.
    """
    gone = evidence.vanished or evidence.stored_chunks < evidence.expected_chunks
    return _evicted(evidence) if evidence.store.evicted and gone else None


def perhaps_evicts(evidence: Evidence) -> Diagnosis | None:
    """The same as a last resort: chunks of the router's prompts cannot be counted."""
    return _evicted(evidence) if evidence.store.evicted and evidence.missed else None


def _evicted(evidence: Evidence) -> Diagnosis:
    keys = f"; {evidence.vanished} of them belong to the check" if evidence.vanished else ""
    limit = evidence.store.memory.limit_mib
    size = f" ({limit})" if limit else ""
    return Diagnosis(
        "store_evicts",
        f"Redis is full{size} and evicted {evidence.store.evicted} keys during the check, before "
        f"the decode read what its prefill stored{keys}",
        "raise maxmemory of that Redis"
        if evidence.store.user_supplied
        else f"raise redis.memory_gib in deploy.yaml; {evidence.restart_hint()}",
    )


def refused_values(evidence: Evidence) -> Diagnosis | None:
    """Values that do not match what was stored."""
    if not evidence.refused:
        return None
    return Diagnosis(
        "values_refused",
        f"{evidence.refused:.0f} values in Redis are not what was stored (corrupt, truncated or "
        "foreign); their chunks were recomputed",
        f"deploy logs --name {evidence.stack}, and look for 'a value is not used'",
    )


def fails(evidence: Evidence) -> Diagnosis | None:
    """Any other Redis failure, with its message, by engine."""
    failed = evidence.calls_failed()
    kinds = evidence.kinds_failed()
    left_out = any(engine.left_out for engine in evidence.engines)
    # Redis counts errors of all clients: alone they only show refusals that stop an engine.
    silent = "redis" in failed or not (kinds or left_out) or (kinds and kinds <= _TOLD)
    if silent and (evidence.store.denied or not evidence.store.refusal):
        return None
    parts = [f"it says '{evidence.store.refusal}'"] if evidence.store.refusal else []
    for engine in evidence.engines:
        calls, out = failed.get(engine.name, {}), engine.left_out
        if calls or out:
            said = f", which says '{engine.said}'" if engine.said else ""
            chunks = f", {out:.0f} chunks not stored" if out else ""
            parts.append(f"{engine.name}: {_counts(calls) or 'no call failed'}{chunks}{said}")
    lost = f"; {evidence.not_loaded:.0f} chunks not loaded" if evidence.not_loaded else ""
    return Diagnosis(
        "store_fails",
        f"Redis failed calls of the engines: {'; '.join(parts)}{lost}",
        f"deploy logs {evidence.store.services[0]} {_first_failed(evidence)} "
        f"--name {evidence.stack}"
        if not evidence.store.user_supplied
        else f"deploy logs {_first_failed(evidence)} --name {evidence.stack}, and check the "
        "Redis of redis.url_file",
    )


def late(evidence: Evidence) -> Diagnosis | None:
    """Answers that were sent before their KV was stored."""
    slow = [engine for engine in evidence.engines if engine.late]
    if not slow:
        return None
    said = "; ".join(f"{engine.late:.0f} of {engine.name}" for engine in slow)
    return Diagnosis(
        "stores_late",
        f"answers were sent before their KV was stored, so decodes came too early: {said}",
        f"find out why {evidence.store.name} is slow: "
        f"deploy status --watch --name {evidence.stack}",
    )


def not_stored(evidence: Evidence) -> Diagnosis | None:
    """Chunks that never arrived, for any other reason."""
    if evidence.stored_chunks >= evidence.expected_chunks:
        return None
    producers = [engine.name for engine in evidence.engines if engine.role != "consumer"]
    return Diagnosis(
        "not_stored",
        f"only {evidence.stored_chunks} of {evidence.expected_chunks} chunks reached Redis",
        f"deploy logs {join(producers[:1])} --name {evidence.stack}, and look for LMCache's errors",
    )


def _first_failed(evidence: Evidence) -> str:
    return next((e.name for e in evidence.engines if e.failures or e.left_out), "")


def _words(evidence: Evidence, kinds: set[str]) -> str:
    """Describe these errors: the engines, how often, and one message of Redis."""
    failed = evidence.calls_failed()
    told = {name: {k: n for k, n in found.items() if k in kinds} for name, found in failed.items()}
    said = next((e.said for e in evidence.engines if e.said and told.get(e.name)), "")
    counts = "; ".join(f"{name} {_counts(found)}" for name, found in told.items() if found)
    return f"{counts}, with the message '{said}'" if said else counts


def _counts(kinds: Mapping[str, float]) -> str:
    return join([f"{count:.0f} x {kind}" for kind, count in sorted(kinds.items())])
