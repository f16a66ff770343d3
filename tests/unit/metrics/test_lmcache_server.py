"""The page of LMCache's server, as LMCache 0.5.6 writes it."""

from __future__ import annotations

from deploy.metrics.lmcache_server import LmcacheServerPressure, LmcacheServerUse
from deploy.metrics.page import MetricsPage, parsed_page

PAGE = """
lmcache_mp_l1_memory_usage_bytes{backend="dram",l1_tag="_default"} 3.2505856e+07
lmcache_mp_lookup_requested_tokens_total{cache_salt="",model_name="/models/tiny"} 56064.0
lmcache_mp_lookup_requested_tokens_total{cache_salt="one",model_name="/models/tiny"} 1536.0
lmcache_mp_lookup_hit_l1_tokens_total{cache_salt="",model_name="/models/tiny"} 44032.0
lmcache_mp_lookup_hit_l1_tokens_total{cache_salt="one",model_name="/models/tiny"} 768.0
lmcache_mp_lookup_hit_l2_tokens_total{cache_salt="",model_name="/models/tiny"} 5120.0
"""


def test_all_models_and_salts_are_summed() -> None:
    use = LmcacheServerUse.read(parsed_page(PAGE), 2**30)
    assert use == LmcacheServerUse(32505856, 2**30, 57600, 44800, 5120)


def test_a_server_without_requests_has_zeros() -> None:
    page = parsed_page('lmcache_mp_l1_memory_usage_bytes{backend="dram"} 0.0')
    assert LmcacheServerUse.read(page, 2**30) == LmcacheServerUse(0, 2**30, 0, 0, 0)


def test_failures_for_lack_of_memory_are_counted() -> None:
    """What was evicted says nothing: `check` drops KV, too. Other failures are no lack of room."""
    page = parsed_page("""
lmcache_mp_l1_evicted_chunks_total{l1_tag="_default"} 24.0
lmcache_mp_l1_eviction_loop_ticks_total 57.0
lmcache_mp_l1_eviction_loop_triggered_total 2.0
lmcache_mp_l1_allocation_failure_chunks_total{during="l1_store",model_name="/models/tiny"} 3.0
lmcache_mp_l2_prefetch_failure_chunks_total{model_name="/models/tiny",reason="l1_oom"} 4.0
lmcache_mp_l2_prefetch_failure_chunks_total{model_name="/models/tiny",reason="not_found"} 5.0
""")
    assert LmcacheServerPressure.read(page) == LmcacheServerPressure(no_room=7, evictions=2)
    assert LmcacheServerPressure.read(parsed_page(PAGE)) == LmcacheServerPressure(0, 0)


def test_a_page_without_these_metrics_is_unknown() -> None:
    assert LmcacheServerUse.read(MetricsPage(), 2**30) is None
