"""Rules on the code that engines run: versions, plug-in points, native code, fixes."""

from __future__ import annotations

from deploy.config.fields import IN_ENGINES
from deploy.doctor.docker import engine_image
from deploy.doctor.finding import Rule, Verdict, fail, note, ok, tried, unknown, warn
from deploy.doctor.observed import EngineCode, ImageSeen, Seen
from deploy.planning.connector import HOW_TO


def _native(seen: Seen) -> Verdict | None:
    code, plan, image = seen.code, seen.plan, engine_image(seen)
    if plan is None:
        return None
    ours = {gpu.arch for engine in plan.engines for gpu in engine.gpus if gpu.arch}
    if code is None:
        return _to_be_built(image, ours) if image and not image.here else None
    if code.trouble:
        return unknown(f"cannot inspect {code.where}: {code.trouble}")
    if not plan.vendor.has_gpus:
        return ok("not needed on CPUs: pdkit's connector moves the KV")
    return _loaded(code, plan.vendor.name, ours)


def _loaded(code: EngineCode, vendor: str, ours: set[str]) -> Verdict:
    if not code.native or code.native_trouble:
        why = code.native_trouble or "it is missing"
        return warn(
            f"LMCache {code.lmcache} in {code.where}: its native code does not load: {why}",
            "KV is moved by a fallback that is many times slower",
            "use an image with a tested pair: deploy images list",
        )
    missing = sorted(ours - set(code.native_archs))
    if vendor == "rocm" and code.native_archs and missing:
        return fail(
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
    return warn(
        f"LMCache in {image.reference} would be built for {', '.join(image.archs)}, "
        f"and the GPUs are {', '.join(missing)}",
        "KV cannot be moved to and from these GPUs",
        _built_for(missing),
    )


def _built_for(archs: list[str]) -> str:
    return f"deploy images build rocm --build-arg LMCACHE_ROCM_ARCH='{';'.join(archs)}'"


def _plug_ins(seen: Seen) -> Verdict | None:
    code = seen.code
    if code is None or code.trouble or not code.plugs:
        return None
    missing = [point for point, there in code.plugs.items() if not there]
    versions = f"vLLM {code.vllm}, LMCache {code.lmcache}"
    if seen.spec.redis.client != "pdkit":
        missing = [point for point in missing if not point.startswith("LMCache")]
    if missing:
        return fail(
            f"{versions} in {code.where} lack {' and '.join(missing)}",
            "pdkit's connector cannot be loaded",
            "use an image or packages of a tested pair: deploy images list",
        )
    return ok(f"{versions}: {' and '.join(code.plugs)}")


def _connector(seen: Seen) -> Verdict | None:
    choice = seen.connector
    if choice is None or choice.name != IN_ENGINES:
        return None
    here = (
        f"would be refused here: {choice.refused}"
        if choice.refused
        else f"works here too: {HOW_TO}"
    )
    return note(
        f"LMCache runs inside each engine; its successor, LMCache's server, {here}",
        "LMCache began to deprecate this mode in the third quarter of 2026 "
        "(https://github.com/LMCache/LMCache/issues/4025); no release without it is known, and the "
        "tested pairs have it. With the server there is one more service, which takes its memory "
        "at its start; the cache starts empty once; layerwise mode does not work",
    )


RULES = (
    Rule(
        "engine.programs",
        tried("programs", "the services cannot be started"),
        looks_at="for processes: the interpreter with vLLM, LMCache and the router, shared "
        "libraries, redis-server; with `--monitoring` also Prometheus",
        fails="one is missing", fix="`./scripts/quickstart`, or what the message says",
    ),
    Rule(
        "engine.versions",
        tried("versions", "this pair of versions is broken or untested"),
        looks_at="the versions of vLLM and LMCache, against the compatibility table",
        fails="the pair is broken or untested (exit code 2)",
        fix="the `--image` that the message names, or `--allow-untested`",
    ),
    Rule(
        "engine.plug_ins", _plug_ins,
        looks_at="the plug-in points of pdkit's connector and Redis path: "
        "`kv_connector_module_path` of vLLM, `storage_plugins` of LMCache",
        fails="one is missing", fix="a tested pair: `deploy images list`",
    ),
    Rule(
        "engine.connector", _connector,
        looks_at="whether LMCache runs inside the engines, which is deprecated; a note only",
    ),
    Rule(
        "engine.native", _native,
        looks_at="whether LMCache's native code loads, and for which gfx targets it is built",
        fails="ROCm: it is not built for these GPUs",
        warns="it does not load, or the image to build would not be for these GPUs",
        fix="a tested pair, or `deploy images build rocm` with `LMCACHE_ROCM_ARCH`",
    ),
    Rule(
        "engine.fixes",
        tried("fixes", "engines would exit at start, or move wrong KV"),
        looks_at="the connector's fixes, tried where engines will run; cached once they work",
        fails="a needed fix fails", fix="a tested pair, or `PDKIT_DISABLE_FIXES`",
    ),
)  # fmt: skip
