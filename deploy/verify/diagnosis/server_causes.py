"""Causes in LMCache's server, or between it and the engines."""

from __future__ import annotations

from deploy.verify.diagnosis.evidence import Evidence, join, said_by
from deploy.verify.report import Diagnosis


def no_shared_memory(evidence: Evidence) -> Diagnosis | None:
    """Engines that ended and cannot start again, as the server could not reach their KV."""
    ended = [engine.name for engine in evidence.engines if engine.ended]
    server = evidence.server
    if server is None or server.shm_free_mib is None or not ended:
        return None
    if server.shm_free_mib >= server.shm_engine_mib:
        return None
    return Diagnosis(
        "shared_memory_full",
        f"{join(ended)} exited during the check, and cannot start again: its KV takes "
        f"{server.shm_engine_mib} MiB of /dev/shm, which has {server.shm_free_mib} MiB free",
        "free space in /dev/shm (ls -l /dev/shm), or set a smaller engine.kv_cache_gib in "
        f"deploy.yaml; {evidence.restart_hint()}",
    )


def full(evidence: Evidence) -> Diagnosis | None:
    """Chunks that the server had no memory for."""
    server = evidence.server
    if server is None or not server.no_room or not evidence.missed:
        return None
    return Diagnosis(
        "server_full",
        f"LMCache's server had no room ({server.memory_mib} MiB) for {server.no_room} chunks, "
        "which were not stored, or not loaded from Redis",
        _larger(evidence),
    )


def perhaps_evicts(evidence: Evidence) -> Diagnosis | None:
    """KV that the server dropped, as a last resort: Redis should have it."""
    server = evidence.server
    if server is None or not server.evictions or not evidence.missed:
        return None
    return Diagnosis(
        "server_full",
        f"LMCache's server is full ({server.memory_mib} MiB) and dropped KV during the check, "
        "perhaps before Redis had it and before the decode read it",
        _larger(evidence),
    )


def _larger(evidence: Evidence) -> str:
    return f"raise lmcache.server_gib in deploy.yaml; {evidence.restart_hint()}"


def versions(evidence: Evidence) -> Diagnosis | None:
    """A server and engines that run different versions of LMCache."""
    server = evidence.server
    if server is None or not server.lmcache:
        return None
    known = [
        engine for engine in evidence.engines if engine.kv.get("lmcache", "unknown") != "unknown"
    ]
    told = {engine.name: engine.kv["lmcache"] for engine in known}
    if set(told.values()) <= {server.lmcache}:
        return None
    return Diagnosis(
        "lmcache_differs",
        "LMCache's server and the engines run different versions of LMCache, which may not "
        f"understand each other: {said_by({**told, server.name: server.lmcache})}",
        f"start all of them with the version that is installed: {evidence.restart_hint()}",
    )


def forgets(evidence: Evidence) -> Diagnosis | None:
    """Engines whose KV memory the server does not know."""
    server = evidence.server
    if server is None or server.engines is None:
        return None
    # Those of another host have another server.
    here = [engine for engine in evidence.engines if engine.hash_seed is not None]
    running = {engine.name: engine.kv for engine in here if not engine.ended}
    unknown = [
        name
        for name, kv in running.items()
        if not set(kv.get("instances", ())) <= set(server.engines)
    ]
    if not unknown:
        return None
    return Diagnosis(
        "engine_unknown",
        f"LMCache's server does not know {join(unknown)}, and stores and loads nothing for it: it "
        "forgets an engine that was suspended for minutes",
        "; ".join(f"deploy restart {name} --name {evidence.stack}" for name in unknown),
    )
