"""Rules on the code that engines run: versions, plug-in points, native code, fixes."""

from __future__ import annotations

from deploy.doctor.docker import engine_image
from deploy.doctor.finding import Rule, Verdict, ok, tried, unknown
from deploy.doctor.seen import EngineCode, ImageSeen, Seen


def native(seen: Seen) -> Verdict | None:
    code, plan, image = seen.code, seen.plan, engine_image(seen)
    if plan is None:
        return None
    ours = {gpu.arch for engine in plan.engines for gpu in engine.gpus if gpu.arch}
    if code is None:
        return _to_be_built(image, ours) if image and not image.here else None
    if code.trouble:
        return unknown(f"nothing could be asked in {code.where}: {code.trouble}")
    if not plan.vendor.has_gpus:
        return ok("not needed on processors: the kit's connector moves the KV")
    return _loaded(code, plan.vendor.name, ours)


def _loaded(code: EngineCode, vendor: str, ours: set[str]) -> Verdict:
    if not code.native or code.native_trouble:
        why = code.native_trouble or "it has none"
        return Verdict(
            "warn",
            f"LMCache {code.lmcache} of {code.where} has no native code that loads: {why}",
            "KV is moved by code that is many times slower, and one line of a log says so",
            "an image whose pair is proven: deploy images list",
        )
    missing = sorted(ours - set(code.native_archs))
    if vendor == "rocm" and code.native_archs and missing:
        return Verdict(
            "fail",
            f"{code.native} is built for {', '.join(code.native_archs)}, and the GPUs are "
            + ", ".join(missing),
            "KV cannot be moved to and from these GPUs",
            _built_for(missing),
        )
    return ok(f"{code.native} loads with torch {code.torch}")


def _to_be_built(image: ImageSeen, ours: set[str]) -> Verdict | None:
    missing = sorted(ours - set(image.archs))
    if not image.archs or not missing:
        return None
    return Verdict(
        "warn",
        f"LMCache of {image.reference} would be for {', '.join(image.archs)}, and the GPUs are "
        + ", ".join(missing),
        "KV cannot be moved to and from these GPUs",
        _built_for(missing),
    )


def _built_for(archs: list[str]) -> str:
    return (
        "deploy images build rocm --build-arg LMCACHE_SOURCE=git+https://github.com/LMCache/"
        f"LMCache.git@vVERSION --build-arg LMCACHE_ROCM_ARCH='{';'.join(archs)}'"
    )


def plug_ins(seen: Seen) -> Verdict | None:
    code = seen.code
    if code is None or code.trouble or not code.plugs:
        return None
    missing = [point for point, there in code.plugs.items() if not there]
    versions = f"vLLM {code.vllm}, LMCache {code.lmcache}"
    if seen.spec.redis.client != "pdkit":
        missing = [point for point in missing if not point.startswith("LMCache")]
    if missing:
        return Verdict(
            "fail",
            f"{versions} of {code.where} lack {' and '.join(missing)}",
            "the kit's connector cannot be loaded",
            "an image or packages whose pair is proven: deploy images list",
        )
    return ok(f"{versions}: {' and '.join(code.plugs)}")


def hash_seed(seen: Seen) -> Verdict | None:
    seeds = set(seen.hash_seeds.values())
    if not seeds:
        return None
    if len(seeds) > 1 or "" in seeds:
        return Verdict(
            "fail",
            "engines would get different PYTHONHASHSEEDs",
            "the same prompt has other keys in each, and nothing ever hits",
            "this is a fault of the kit: report it",
        )
    return ok(f"PYTHONHASHSEED is {seeds.pop()} in every engine, whatever this shell has")


RULES = (
    Rule(
        "engine.programs",
        tried("programs", "there is nothing to start the services with"),
        looks_at="where engines are processes: the interpreter with vLLM, LMCache and the router, "
        "shared libraries, redis-server",
        fails="one is missing", fix="`./scripts/quickstart`, or what the message names",
    ),
    Rule(
        "engine.versions",
        tried("versions", "they have been seen to fail together, or nobody has tried them"),
        looks_at="vLLM and LMCache of the interpreter or image against the table of versions that "
        "go together",
        fails="the pair is broken or unproven (exit code 2)",
        fix="the `--image` it names, or `--allow-unproven`",
    ),
    Rule(
        "engine.plug_ins", plug_ins,
        looks_at="the points by which the kit's connector and Redis path are loaded: "
        "`kv_connector_module_path` of vLLM, `storage_plugins` of LMCache",
        fails="one is not there", fix="a proven pair: `deploy images list`",
    ),
    Rule(
        "engine.native", native,
        looks_at="whether LMCache's native code loads, and for which gfx targets it is built",
        fails="ROCm: it is not built for these GPUs",
        warns="it does not load, or an image that is to be built would not be for these GPUs",
        fix="a proven pair, or `deploy images build rocm` with `LMCACHE_ROCM_ARCH`",
    ),
    Rule(
        "engine.fixes",
        tried("fixes", "engines would end at their start, or move wrong KV"),
        looks_at="the connector's fixes, tried where engines will run; remembered once they took",
        fails="one is needed and does not take", fix="a proven pair, or `PDKIT_DISABLE_FIXES`",
    ),
    Rule(
        "engine.hash_seed", hash_seed,
        looks_at="the PYTHONHASHSEED that each engine would get",
        fails="they differ, which is a fault of the kit", fix="report it",
    ),
)  # fmt: skip
