"""What an engine without a prefix cache of its own reports and counts."""

from __future__ import annotations

import pytest

from deploy.metrics.engine import CacheCounters, caches_prefixes
from deploy.metrics.lmcache_server import tiers_of
from deploy.metrics.page import parsed_page
from deploy.verify.hits import Tiers

INFO = (
    'vllm:cache_config_info{{block_size="32",enable_prefix_caching="{told}",engine="{core}"}} 1.0'
)


@pytest.mark.parametrize(
    ("told", "caches"), [(["True"], True), (["False"], False), (["True", "False"], False)]
)
def test_an_engine_says_it_of_itself(told: list[str], caches: bool) -> None:
    lines = [INFO.format(told=one, core=core) for core, one in enumerate(told)]
    assert caches_prefixes(parsed_page("\n".join(lines) + "\n")) is caches


def test_one_that_does_not_say_has_one() -> None:
    assert caches_prefixes(parsed_page("vllm:num_requests_running 0\n"))


@pytest.mark.parametrize(
    ("cache", "tiers"),
    [
        (CacheCounters(1000, 768, 0, 0), Tiers(1000, 0, 0, 768, 232)),
        (CacheCounters(744, 512, 1000, 256), Tiers(1000, 256, 0, 512, 232)),
    ],
    ids=["without", "with"],
)
def test_its_prompts_are_counted_by_what_the_store_was_asked_for(
    cache: CacheCounters, tiers: Tiers
) -> None:
    assert cache.prompt_tokens == 1000
    assert tiers_of(cache, None) == tiers
