"""Rules on the ports, memory and disk space that a stack needs."""

from __future__ import annotations

from deploy.doctor.finding import Rule, Verdict, fail, ok, tried, unknown, warn
from deploy.doctor.observed import FolderSeen, ImageSeen, Seen
from deploy.planning.memory import GIB, MIB

# Logs, the tiny model, and the files of a stack.
_STATE_MIB, _STATE_WARN_MIB = 64, 1024
# During a build an image's layers and their inputs exist at the same time.
_BUILD_FACTOR = 2
_HUB_SPARE = 1.1


def store(seen: Seen) -> Verdict | None:
    """Judge whether the KV of the longest prompt fits into the store."""
    plan = seen.plan
    if plan is None or plan.limits.stored_token_bytes is None or plan.max_model_len is None:
        return None
    if not plan.shares_kv:
        return None
    length, a_token = plan.max_model_len, plan.limits.stored_token_bytes
    tokens, server = plan.store_tokens, plan.kv_server
    what = "LMCache's server" if server else "Redis"
    setting = "lmcache: {server_gib" if server else "redis: {memory_gib"
    if tokens is not None and tokens < length:
        return warn(
            f"{what} holds {tokens} tokens of KV, but a prompt may have {length}",
            "the start of a long prompt is evicted while its end is stored, so it never hits",
            f"{setting}: {2 * length * a_token / GIB:.1f}}} in deploy.yaml",
        )
    held = "your own Redis" if tokens is None else f"{what} holds {tokens:,} tokens of KV"
    return ok(f"{held}; a prompt has at most {length:,}")


def _images(seen: Seen) -> Verdict | None:
    missing = [image for image in seen.images if not image.here]
    if seen.disks is None or seen.disks.images is None:
        return None
    if not missing:
        return ok(f"all images are on this machine; {_free(seen.disks.images)}")
    return _missing_images(missing, seen.disks.images)


def _missing_images(missing: list[ImageSeen], place: FolderSeen) -> Verdict:
    sizes = [image.size_mib for image in missing]
    needed = sum(size for size in sizes if size is not None)
    what = f"missing images take {_gib(needed)} unpacked"
    if place.free_mib is None:
        return unknown(f"{what}; free space at {place.path} is not visible from here")
    if None in sizes:
        return unknown(f"{_free(place)}; the size of your own image is unknown")
    sure = all(image.size_sure for image in missing)
    if place.free_mib < needed:
        return Verdict(
            "fail" if sure else "warn",
            f"{what}{'' if sure else ' (estimated)'}, but only {_free(place)}",
            "building or pulling them fills the disk",
            "docker image prune -a and docker builder prune free what no container uses",
        )
    if place.free_mib < _BUILD_FACTOR * needed:
        return warn(
            f"{what}, with only {_free(place)}",
            "a build keeps layers and their inputs at once, and may fill the disk",
            "docker image prune -a and docker builder prune free what no container uses",
        )
    return ok(f"{what}; {_free(place)}")


def _hub(seen: Seen) -> Verdict | None:
    if seen.disks is None or seen.disks.hub is None or seen.hub is None or seen.plan is None:
        return None
    if seen.hub.cached:
        return ok(f"the model is on this machine; {_free(seen.disks.hub)}")
    place, weights = seen.disks.hub, seen.plan.model.weight_bytes
    if place.writable is False:
        return fail(
            f"this user may not write to {place.path}",
            "the model cannot be downloaded",
            "set hub_cache in deploy.yaml to a folder you can write to",
        )
    if place.free_mib is None or weights is None:
        return unknown(f"{_free(place)}; the size of the model is unknown")
    needed = int(weights * _HUB_SPARE) // MIB
    if place.free_mib < needed:
        return fail(
            f"{seen.plan.model.ref} takes {_gib(needed)}, but only {_free(place)}",
            "the download fills the disk, and engines exit",
            "free some space, or set hub_cache in deploy.yaml to a folder on another disk",
        )
    return ok(f"{seen.plan.model.ref} takes {_gib(needed)}; {_free(place)}")


def state(seen: Seen) -> Verdict | None:
    if seen.disks is None:
        return None
    place = seen.disks.state
    fix = "free some space, or set PDKIT_HOME to a folder on another disk"
    if place.writable is False:
        return fail(
            f"this user may not write to {place.path}",
            "the stack's state cannot be saved",
            "set PDKIT_HOME to a folder you can write to",
        )
    if place.free_mib is None:
        return unknown(f"free space at {place.path} is unknown")
    if place.free_mib < _STATE_MIB:
        why = "state, logs and the tiny model do not fit"
        return fail(f"only {_free(place)}", why, fix)
    if place.free_mib < _STATE_WARN_MIB:
        return warn(f"only {_free(place)}", "logs grow while engines run", fix)
    return ok(_free(place))


def _free(place: FolderSeen) -> str:
    return f"{_gib(place.free_mib)} free at {place.path}"


def _gib(mib: int | None) -> str:
    if mib is None:
        return "an unknown number of GiB"
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB"


RULES = (
    Rule(
        "ports.free",
        tried("ports", "a service could not start listening"),
        looks_at="every port that the stack needs, and the address of `--bind`",
        fails="a port is in use, or the address does not belong to this machine",
        fix="the `--port` that the message suggests",
    ),
    Rule(
        "memory.host",
        tried("memory", "the kernel would kill an engine while it loads"),
        looks_at="free memory against the plan: engines, their staging and KV, Redis; limits of "
        "control groups (versions 1 and 2) count",
        fails="the plan does not fit",
        fix="the settings that the message names, the most effective first",
    ),
    Rule(
        "memory.plan",
        tried("plan", "an engine could not hold any KV"),
        looks_at="weights and KV against the memory that each engine gets",
        fails="the plan does not fit",
        fix="a larger `--tp`, a smaller model, or `engine.kv_cache_gib`",
    ),
    Rule(
        "memory.store",
        store,
        looks_at="how many tokens of KV Redis, or LMCache's server, holds",
        warns="fewer than the longest prompt",
        fix="`redis.memory_gib`, or `lmcache.server_gib`",
    ),
    Rule(
        "disk.images",
        _images,
        looks_at="disk space for missing images, by the sizes in the catalogue",
        fails="a measured size does not fit",
        warns="an estimated size does not fit, or there is not twice as much",
        fix="`docker image prune -a`",
    ),
    Rule(
        "disk.hub",
        _hub,
        looks_at="disk space for a Hugging Face model that is not cached",
        fails="it does not fit, or the folder cannot be written",
        fix="`hub_cache` in deploy.yaml",
    ),
    Rule(
        "disk.state",
        state,
        looks_at="disk space and permissions for state, logs and caches",
        fails="less than 64 MiB, or the folder cannot be written",
        warns="less than 1 GiB",
        fix="`PDKIT_HOME`",
    ),
)
