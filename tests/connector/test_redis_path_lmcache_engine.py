"""LMCache's own engine over the Redis path: all between the tensors and Redis is the real thing."""

from __future__ import annotations

from unittest import mock

from kv_samples import make_case, same_bytes
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.token_database import ChunkedTokenDatabase
from pdkit_connector import store_barrier
from pdkit_connector.in_engine.cpu_blocks import Geometry
from pdkit_connector.in_engine.cpu_mover import BlockMover
from pdkit_connector.redis_path.value import Header, digest
from redis_backend import PAYLOAD
from redis_servers import eventually

from lmcache_objects import CHUNK, HEAD_SIZE, HEADS, LAYERS, metadata, redis_path_config  # isort: skip


def test_the_engine_loads_its_chunks_and_survives_a_forgery(server):
    settings, facts = redis_path_config(server.url), metadata()
    mover = BlockMover(Geometry(LAYERS, HEADS, CHUNK, HEAD_SIZE, 2))
    database = ChunkedTokenDatabase(settings, facts)
    with mock.patch("gc.collect"):
        engine = LMCacheEngine(settings, facts, database, mover, None, None)
        engine.post_init(kvcaches=[])
    case = make_case(
        layers=LAYERS, heads=HEADS, block=CHUNK, head=HEAD_SIZE, chunk=CHUNK, num_blocks=8
    )
    sent, received = case.kv(seed=1), case.kv(seed=2)
    slots, tokens = case.slots([3, 1, 5]), list(range(3 * CHUNK))
    engine.store(tokens, kvcaches=sent, slot_mapping=slots, offset=0, req_id="a")
    eventually(lambda: not store_barrier.under_way(), 30)

    def retrieved():
        return int(engine.retrieve(tokens, kvcaches=received, slot_mapping=slots, req_id="b").sum())

    assert retrieved() == len(tokens)
    for there, here in zip(sent, received, strict=True):
        assert same_bytes(there[[3, 1, 5]], here[[3, 1, 5]])
    backend = engine.storage_manager.storage_backends["pdkit"]
    third = list(database.process_tokens(tokens))[2][2]
    name = backend._names.one(third)
    half = bytes(PAYLOAD // 2)
    shape = (2, LAYERS, CHUNK // 2, HEADS * HEAD_SIZE)
    format_ = MemoryFormat.KV_2LTD.value
    said = Header("bfloat16", shape, format_, len(half), backend._codec.layout, digest(name))
    server.admin.set(name, backend._codec.header(said, half) + half)
    assert retrieved() == 2 * CHUNK, "the third chunk is computed again"
    engine.close()
