"""Rules on what a stack takes of the machine: ports, memory and disks."""

from __future__ import annotations

from deploy.doctor.finding import Rule, Verdict, ok, tried, unknown
from deploy.doctor.seen import ImageSeen, Place, Seen
from deploy.planning.memory import GIB, MIB

# Logs, the tiny model, and the files of a stack.
_STATE_MIB, _STATE_WARN_MIB = 64, 1024
# While an image is built, its layers and what they are made of are there together.
_BUILD_FACTOR = 2
_HUB_SPARE = 1.1


def store(seen: Seen) -> Verdict | None:
    """Judge whether what a prompt leaves in the store has room."""
    plan = seen.plan
    if plan is None or plan.kv_bytes_per_token is None or plan.max_model_len is None:
        return None
    length, prompt = plan.max_model_len, plan.max_model_len * plan.kv_bytes_per_token
    tokens = plan.store_tokens
    if tokens is not None and tokens < length:
        return Verdict(
            "warn",
            f"Redis holds {tokens} tokens of KV, and a prompt may have {length}",
            "the beginning of a long prompt is dropped while its end is stored, so it never hits",
            f"redis: {{memory_gib: {2 * prompt / GIB:.1f}}} in deploy.yaml",
        )
    held = "your own Redis" if tokens is None else f"Redis holds {tokens:,} tokens of KV"
    return ok(f"{held}; a prompt has {length:,}")


def images(seen: Seen) -> Verdict | None:
    missing = [image for image in seen.images if not image.here]
    if seen.disks is None or seen.disks.images is None:
        return None
    if not missing:
        return ok(f"all images are here; {_free(seen.disks.images)}")
    return _missing_images(missing, seen.disks.images)


def _missing_images(missing: list[ImageSeen], place: Place) -> Verdict:
    sizes = [image.size_mib for image in missing]
    needed = sum(size for size in sizes if size is not None)
    what = f"missing images take {_gib(needed)} unpacked"
    if place.free_mib is None:
        return unknown(f"{what}; the disk of {place.path} cannot be asked from here")
    if None in sizes:
        return unknown(f"{_free(place)}; the size of an image of yours is not known")
    sure = all(image.size_sure for image in missing)
    if place.free_mib < needed:
        return Verdict(
            "fail" if sure else "warn",
            f"{what}{'' if sure else ' by estimate'}, and there are {_free(place)}",
            "building or pulling them ends with a full disk",
            "docker image prune -a and docker builder prune free what no container uses",
        )
    if place.free_mib < _BUILD_FACTOR * needed:
        return Verdict(
            "warn",
            f"{what}, and there are {_free(place)}",
            "a build holds layers and what they are made of at once, and may fill the disk",
            "docker image prune -a and docker builder prune free what no container uses",
        )
    return ok(f"{what}; {_free(place)}")


def hub(seen: Seen) -> Verdict | None:
    if seen.disks is None or seen.disks.hub is None or seen.hub is None or seen.plan is None:
        return None
    if seen.hub.cached:
        return ok(f"the model is here; {_free(seen.disks.hub)}")
    place, weights = seen.disks.hub, seen.plan.model.weight_bytes
    if place.writable is False:
        return Verdict(
            "fail",
            f"this user may not write into {place.path}",
            "engines cannot put the model there",
            "hub_cache: A FOLDER OF YOURS in deploy.yaml",
        )
    if place.free_mib is None or weights is None:
        return unknown(f"{_free(place)}; how large the model is, its hub has not said")
    needed = int(weights * _HUB_SPARE) // MIB
    if place.free_mib < needed:
        return Verdict(
            "fail",
            f"{seen.plan.model.ref} takes {_gib(needed)}, and there are {_free(place)}",
            "the download ends with a full disk, and engines with it",
            "free some, or hub_cache: A FOLDER ON ANOTHER DISK in deploy.yaml",
        )
    return ok(f"{seen.plan.model.ref} takes {_gib(needed)}; {_free(place)}")


def state(seen: Seen) -> Verdict | None:
    if seen.disks is None:
        return None
    place = seen.disks.state
    fix = "free some, or set PDKIT_HOME to a folder on another disk"
    if place.writable is False:
        return Verdict(
            "fail", f"this user may not write into {place.path}",
            "nothing of the stack could be recorded", "set PDKIT_HOME to a folder of yours",
        )  # fmt: skip
    if place.free_mib is None:
        return unknown(f"the disk of {place.path} cannot be asked")
    if place.free_mib < _STATE_MIB:
        why = "state, logs and the tiny model do not fit"
        return Verdict("fail", f"there are {_free(place)}", why, fix)
    if place.free_mib < _STATE_WARN_MIB:
        return Verdict("warn", f"there are {_free(place)}", "logs grow while engines run", fix)
    return ok(_free(place))


def _free(place: Place) -> str:
    return f"{_gib(place.free_mib)} free at {place.path}"


def _gib(mib: int | None) -> str:
    if mib is None:
        return "an unknown number of GiB"
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB"


RULES = (
    Rule(
        "ports.free",
        tried("ports", "a service could not listen"),
        looks_at="every port that the stack would take, and the address of `--bind`",
        fails="another program or stack has one, or the address is not of this machine",
        fix="the `--port` that it names",
    ),
    Rule(
        "memory.host",
        tried("memory", "the kernel would end an engine while it loads"),
        looks_at="free memory against the plan: engines, their staging and KV, Redis; limits of "
        "control groups (versions 1 and 2) count",
        fails="the plan does not fit",
        fix="the settings it names, those that save most first",
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
        looks_at="how many tokens of KV Redis holds",
        warns="fewer than the longest prompt has",
        fix="`redis.memory_gib`",
    ),
    Rule(
        "disk.images",
        images,
        looks_at="room for the images that are missing, by the catalogue's sizes",
        fails="a size that was seen does not fit",
        warns="an estimated one does not, or there is not twice as much",
        fix="`docker image prune -a`",
    ),
    Rule(
        "disk.hub",
        hub,
        looks_at="room for a hub's model that is not here yet",
        fails="it does not fit, or the folder cannot be written",
        fix="`hub_cache` in deploy.yaml",
    ),
    Rule(
        "disk.state",
        state,
        looks_at="room and rights where state, logs and caches are kept",
        fails="less than 64 MiB, or the folder cannot be written",
        warns="less than 1 GiB",
        fix="`PDKIT_HOME`",
    ),
)
