"""A prompt of 32,800 tokens with 64 KiB of KV each, twice what staging memory holds.

The producer computes and stores it, the consumer loads it. All chunks must cross, and the consumer
must answer as the producer did.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench.kit import say
from bench.redis_path import page
from bench.redis_path.contender import CHUNK
from bench.redis_path.report import Target, target_table
from bench.redis_path.running_stack import Engine, engines, prompt, wide_stack
from bench.redis_path.wide_model import BYTES_A_TOKEN
from deploy.verify.equivalence import Noise, compare, self_differences
from deploy.verify.hits import eligible_tokens

TOKENS, POSITIONS = 32_800, 32_896
_STAGING_GIB, _REDIS_GIB = 1, 3
_KV_GIB = (POSITIONS * BYTES_A_TOKEN) / 2**30
_ASK_S = 1800.0


def run(_rounds: int, *, as_json: bool, results: Path | None) -> None:
    """Measure, and print what was found."""
    sizes = {
        "engine": {"kv_cache_gib": _KV_GIB},
        "lmcache": {"staging_gib": _STAGING_GIB},
        "redis": {"memory_gib": _REDIS_GIB},
    }
    with wide_stack(positions=POSITIONS, **sizes) as (files, port):
        targets = _cross(*engines(files, port))
    if results:
        results.write_text(page.long_page(target_table(targets)), encoding="utf-8")
    print(json.dumps([asdict(t) for t in targets]) if as_json else target_table(targets))
    if not all(target.met for target in targets):
        sys.exit(1)


def _cross(producer: Engine, consumer: Engine) -> list[Target]:
    asked = prompt(TOKENS, seed=1)
    say("the producer computes")
    computed = producer.answer(asked, _ASK_S)
    noise = Noise({"producer-0": self_differences(computed, producer.answer(asked, _ASK_S))})
    say("the consumer loads")
    loaded = consumer.answer(asked, _ASK_S)
    found = compare(computed, loaded, tolerance=noise.tolerance)
    stored, moved = producer.store_path(), consumer.store_path()
    whole, eligible = TOKENS // CHUNK, eligible_tokens(TOKENS, CHUNK)
    lost = stored.left_out + moved.not_loaded + moved.refused
    return [
        _equal("eligible tokens loaded", eligible, consumer.hits()),
        _equal("chunks stored", whole, stored.stored_chunks),
        _equal("chunks loaded", whole, moved.loaded_chunks),
        _equal("chunks dropped, late or refused", 0, lost),
        Target(
            "difference of the answers", f"<= {noise.tolerance:.2f}",
            f"{found.max_logprob_diff:.3f}", found.matches,
        ),
    ]  # fmt: skip


def _equal(what: str, wanted: int, measured: float) -> Target:
    return Target(what, f"{wanted:,}", f"{measured:,.0f}", measured == wanted)
