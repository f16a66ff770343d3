"""The page of LMCache's server, as LMCache 0.5.6 writes it."""

from __future__ import annotations

from deploy.metrics.kv_server import KvServerUse
from deploy.metrics.page import MetricsPage, parsed_page

PAGE = """
lmcache_mp_l1_memory_usage_bytes{backend="dram",l1_tag="_default"} 3.2505856e+07
lmcache_mp_lookup_requested_tokens_total{cache_salt="",model_name="/models/tiny"} 56064.0
lmcache_mp_lookup_requested_tokens_total{cache_salt="one",model_name="/models/tiny"} 1536.0
lmcache_mp_lookup_hit_l1_tokens_total{cache_salt="",model_name="/models/tiny"} 44032.0
lmcache_mp_lookup_hit_l1_tokens_total{cache_salt="one",model_name="/models/tiny"} 768.0
lmcache_mp_lookup_hit_l2_tokens_total{cache_salt="",model_name="/models/tiny"} 5120.0
"""


def test_all_models_and_salts_count() -> None:
    use = KvServerUse.read(parsed_page(PAGE), 2**30)
    assert use == KvServerUse(32505856, 2**30, 57600, 44800, 5120)


def test_nobody_has_asked_yet() -> None:
    page = parsed_page('lmcache_mp_l1_memory_usage_bytes{backend="dram"} 0.0')
    assert KvServerUse.read(page, 2**30) == KvServerUse(0, 2**30, 0, 0, 0)


def test_a_page_that_does_not_tell() -> None:
    assert KvServerUse.read(MetricsPage(), 2**30) is None
