"""Whether the store keeps up with the GPUs: estimates, from what is stated here.

A load pays only where KV comes out of Redis faster than a GPU would compute it.
"""

from __future__ import annotations

import math

from deploy.config.spec import MAX_SHARDS
from deploy.planning.inventory import Gpu
from deploy.planning.memory import DTYPE_BYTES
from deploy.planning.plan import Plan

# TFLOP/s of one GPU in dense bfloat16, as its maker's data sheet says; by a part of its name, the
# first that fits.
_TFLOPS = (
    ("B200", 2250),
    ("H200", 989),
    ("H100 PCIe", 756),
    ("H100", 989),
    ("A100", 312),
    ("L40S", 362),
    ("MI355X", 2500),
    ("MI325X", 1307),
    ("MI300X", 1307),
)
# Of that, what a prefill of long prompts uses: with it an H100 prefills 25,000 tokens of an 8B
# model a second, between the 20,000 and 40,000 that are reported.
_USED = 0.4
# One Redis stores a GB in 0.55 s and sends it in 0.27 s (docs/results/redis-path.md): whatever is
# stored and loaded once moves at this rate.
_SHARD_GB_S = 1.2


def computed_gb_s(plan: Plan) -> float | None:
    """Return the GB of KV that all producers compute in a second at most; None where no row of the
    table, or nothing of the model, says it.

    A token takes two operations a weight: too few for a long context, too many for experts that are
    not asked.
    """
    gpus = {gpu for engine in plan.producers for gpu in engine.gpus}
    speeds = [_tflops(gpu) for gpu in gpus]
    weights, a_token = plan.model.weight_bytes, plan.kv_bytes_per_token
    if not gpus or None in speeds or not weights or a_token is None:
        return None
    tokens_s = _USED * sum(filter(None, speeds)) * 1e12 / (2 * weights / DTYPE_BYTES[plan.dtype])
    return tokens_s * a_token / 1e9


def rate_note(plan: Plan) -> list[str]:
    """Return what the GPUs can compute and the kit's Redis can carry, and whether it can."""
    computed = computed_gb_s(plan)
    if computed is None or not plan.redis:
        return []
    count = len(plan.redis)
    carried = count * _SHARD_GB_S
    said = (
        f"estimate: prefill computes up to {computed:.1f} GB/s of KV, "
        f"{count} Redis {'carries' if count == 1 else 'carry'} {carried:.1f}"
    )
    if computed <= carried:
        return [said]
    wanted = math.ceil(computed / _SHARD_GB_S)
    way = f"redis.shards: {wanted} would do" if wanted <= MAX_SHARDS else "no redis.shards would do"
    return [f"{said}; under full load, loading KV is slower than computing it ({way})"]


def _tflops(gpu: Gpu) -> int | None:
    return next((tflops for name, tflops in _TFLOPS if name.lower() in gpu.name.lower()), None)
