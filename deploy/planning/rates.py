"""Whether the store keeps up with the GPUs: estimates, from what is stated here.

Loading KV pays only if Redis delivers it faster than a GPU computes it.
"""

from __future__ import annotations

import math
import re

from deploy.config.spec import MAX_SHARDS
from deploy.planning.inventory import Gpu
from deploy.planning.memory import DTYPE_BYTES
from deploy.planning.plan import Plan

# TFLOP/s of one GPU in dense bfloat16, by the vendor's data sheet. The key is one or more words
# of the GPU's name; the first that fits counts.
_TFLOPS = (
    ("GB200", 2500),
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
# The part of that which prefill of long prompts reaches. By it, an H100 prefills 25,000 tokens per
# second of an 8B model; 20,000 to 40,000 are reported.
_USED = 0.4
# One Redis stores a GB in 0.55 s and sends it in 0.27 s (docs/results/redis-path.md): whatever is
# stored and loaded once moves at this rate.
_SHARD_GB_S = 1.2


def computed_gb_s(plan: Plan) -> float | None:
    """Return the GB of KV that all producers compute per second at most; None if the GPU is not in
    the table or the model's config is unknown.

    A token takes two operations per weight: too few for a long context, too many for a mixture of
    experts.
    """
    gpus = {gpu for engine in plan.producers for gpu in engine.gpus}
    speeds = [_tflops(gpu) for gpu in gpus]
    weights, a_token = plan.model.weight_bytes, plan.kv_bytes_per_token
    if not gpus or None in speeds or not weights or a_token is None:
        return None
    count = 8 * weights / (plan.model.kind.weight_bits or 8 * DTYPE_BYTES[plan.dtype])
    tokens_s = _USED * sum(filter(None, speeds)) * 1e12 / (2 * count)
    return tokens_s * a_token / 1e9


def rate_note(plan: Plan, machines: int = 1) -> list[str]:
    """Return a note that compares what the GPUs compute with what the kit's Redis carries.

    Args:
        plan: of all machines.
        machines: how many have GPUs like these.
    """
    of_machine = computed_gb_s(plan)
    if of_machine is None or not plan.redis or plan.kv_server:
        return []
    computed = machines * of_machine
    count = len(plan.redis)
    carried = count * _SHARD_GB_S
    said = (
        f"estimate: prefill computes up to {computed:.1f} GB/s of KV, "
        f"{count} Redis server{'s move' if count > 1 else ' moves'} {carried:.1f}"
    )
    if computed <= carried:
        return [said]
    wanted = math.ceil(computed / _SHARD_GB_S)
    enough = wanted <= MAX_SHARDS
    way = f"redis.shards: {wanted} would be enough" if enough else "no redis.shards would be enough"
    return [f"{said}; under full load, loading KV is slower than computing it ({way})"]


def _tflops(gpu: Gpu) -> int | None:
    return next((tflops for name, tflops in _TFLOPS if _is_named(gpu, name)), None)


def _is_named(gpu: Gpu, words: str) -> bool:
    """Tell whether a GPU's name has these words, and not as a part of longer ones: A1000."""
    return re.search(rf"\b{re.escape(words)}\b", gpu.name, re.IGNORECASE) is not None
