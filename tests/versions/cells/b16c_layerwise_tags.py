"""B16c: a request with tags finds what one with the same tags stored, and nobody else does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from layerwise_engine import CHUNK, LAYERS, SLOTS, Worker, filled, make_engine, request
from pdkit_connector.in_engine.layer_steps import bind

TOKENS = 2 * CHUNK
SPARE = SLOTS - TOKENS
OURS = {"lmcache.tag.tenant": "7", "lmcache.store": "as it is"}
OTHERS: tuple[dict[str, Any] | None, ...] = (None, {}, {"lmcache.tag.tenant": "70"})


def cell() -> None:
    for configs in (OURS, *OTHERS):
        only_its_own(configs)
    side_by_side()
    load_comes_last()


def only_its_own(configs: dict[str, Any] | None) -> None:
    """What one request stores is loaded by its like, and looked up in vain by all others."""
    engine = make_engine()
    stored = filled(engine, 0, TOKENS)
    Worker(engine).step(request("a", TOKENS, configs=configs))
    for asked in (OURS, *OTHERS):
        wanted = TOKENS if (asked or None) == (configs or None) else 0
        found = look_up(engine, asked)
        assert found == wanted, f"with {asked}, {found} of {wanted} tokens stored with {configs}"
    assert_loads(engine, stored, configs)


def side_by_side() -> None:
    """Requests of one step keep their own tags, whatever their order; so do their loads."""
    engine = make_engine()
    every = (None, OURS, {"lmcache.tag.tenant": "70"})
    stored = [filled(engine, index * TOKENS, TOKENS) for index in range(len(every))]
    Worker(engine).step(
        *(
            request(f"s{index}", TOKENS, first_slot=index * TOKENS, configs=configs)
            for index, configs in enumerate(every)
        )
    )
    for configs, kv in zip(every, stored, strict=True):
        assert_loads(engine, kv, configs)


def load_comes_last() -> None:
    """Newer vLLM asks for a step's loads behind the model where the step has none."""
    engine = make_engine()
    stored = filled(engine, 0, TOKENS)
    worker = Worker(engine)
    bind(worker.adapter, request("a", TOKENS, configs=OURS))
    for index in range(LAYERS):
        worker.layer(index)
    worker.adapter.start_load_kv(SimpleNamespace(attn_metadata=object()))
    worker.end()
    assert look_up(engine, OURS) == TOKENS
    assert look_up(engine, None) == 0
    assert_loads(engine, stored, OURS)


def look_up(engine: Any, configs: dict[str, Any] | None) -> int:
    return int(engine.lookup(tokens=list(range(TOKENS)), lookup_id="look", request_configs=configs))


def assert_loads(engine: Any, stored: Any, configs: dict[str, Any] | None) -> None:
    kv = engine.gpu_connector.kv[:, SPARE:]
    kv[:] = 0
    load = request("load", TOKENS, first_slot=SPARE, saved=None, load=(0, TOKENS), configs=configs)
    Worker(engine).step(load)
    assert kv.equal(stored), f"another KV was loaded than what was stored with {configs}"
