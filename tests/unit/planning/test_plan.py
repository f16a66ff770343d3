"""The plan: engines, ports, memory, chunk and context rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.config.model import Model
from deploy.config.shape import ModelShape
from deploy.errors import ConfigError
from deploy.planning.inventory import Gpu, Inventory
from deploy.planning.plan import Plan
from tests.unit.conftest import MACHINE

Make = Callable[..., Plan]

SHAPE = ModelShape(layers=4, attention_heads=4, kv_heads=2, head_dim=64, max_positions=32768)
KV_BYTES = 2 * 4 * 2 * 64 * 2  # K and V, layers, heads, size, bfloat16


def model(**changes: Any) -> Model:
    return Model("/models/m", "m", "folder", replace(SHAPE, **changes))


UNKNOWN_MODEL = Model("owner/name", "owner/name", "hub", None)


def refusal(plan: Make, **fields: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(**fields)
    assert caught.value.hint
    return caught.value


class TestEngines:
    def test_engines_are_named_after_their_roles(self, plan: Make) -> None:
        engines = plan(topology="2p3d").engines
        assert [(engine.name, engine.role) for engine in engines] == [
            ("producer-0", "producer"),
            ("producer-1", "producer"),
            ("consumer-0", "consumer"),
            ("consumer-1", "consumer"),
            ("consumer-2", "consumer"),
        ]

    def test_producers_and_consumers_are_all_engines(self, plan: Make) -> None:
        made = plan(topology="2p3d")
        assert made.producers + made.consumers == made.engines

    @pytest.mark.parametrize(
        ("cpus", "topology", "tp", "threads"),
        [
            (16, "1p1d", 1, 8),
            (16, "2p2d", 1, 4),
            (16, "1p1d", 2, 4),
            (2, "2p2d", 1, 1),
            (7, "1p1d", 1, 3),
        ],
    )
    def test_processors_are_divided(
        self, plan: Make, cpus: int, topology: str, tp: int, threads: int
    ) -> None:
        made = plan(topology=topology, tp=tp, machine=Inventory(cpus, 65536))
        assert {engine.cpu_threads for engine in made.engines} == {threads}

    def test_auto_is_settled(self, plan: Make) -> None:
        made = plan()
        assert (made.vendor.name, made.runtime) == ("cpu", "process")


class TestPorts:
    @pytest.mark.parametrize("topology", ["1p1d", "1p3d", "2p2d", "8p8d"])
    @pytest.mark.parametrize("port", [1024, 8000])
    def test_ports_are_unique_and_consecutive(self, plan: Make, topology: str, port: int) -> None:
        made = plan(topology=topology, port=port)
        engines = [engine.port for engine in made.engines]
        assert made.port == port
        assert engines == list(range(engines[0], engines[0] + len(engines))), "contiguous"
        assert len(made.ports) == len(engines) + 2, "unique"
        assert all(port <= used < port + 10 + len(engines) for used in made.ports)

    def test_each_has_an_owner(self, plan: Make) -> None:
        assert plan(port=9000).ports == {
            9000: "router",
            9002: "router metrics",
            9010: "producer-0",
            9011: "consumer-0",
        }

    def test_the_last_engine_must_fit(self, plan: Make) -> None:
        highest = 65535 - 11
        assert max(plan(port=highest).ports) == 65535
        refused = refusal(plan, port=highest + 1)
        assert f"--port: {highest + 1}" in refused.message
        assert f"--port {highest}" in refused.hint

    @pytest.mark.parametrize("topology", ["1p1d", "4p4d", "32p32d"])
    def test_the_port_of_the_hint_fits(self, plan: Make, topology: str) -> None:
        hint = refusal(plan, port=65535, topology=topology).hint
        port = re.search(r"--port (\d+)", hint)
        assert port is not None
        plan(port=int(port[1]), topology=topology)


class TestCollector:
    """In a container, a loopback address is the container's own."""

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
    def test_a_loopback_collector_is_refused_for_containers(self, plan: Make, host: str) -> None:
        tracing = {"otlp_endpoint": f"http://{host}:4318"}
        refused = refusal(plan, runtime="compose", tracing=tracing)
        assert f"in a container, http://{host}:4318 is the container itself" in refused.message
        assert "http://172.17.0.1:4318" in refused.hint
        assert plan(runtime="process", tracing=tracing).spec.tracing.otlp_endpoint

    @pytest.mark.parametrize("host", ["192.0.2.1", "collector.example"])
    def test_a_remote_collector_is_accepted_for_containers(self, plan: Make, host: str) -> None:
        plan(runtime="compose", tracing={"otlp_endpoint": f"http://{host}:4318"})


class TestBind:
    """Other machines are served without a key only where the user says so."""

    @pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.1", "::"])  # noqa: S104 - not bound here
    def test_a_public_address_needs_a_key(self, plan: Make, bind: str) -> None:
        refused = refusal(plan, bind=bind)
        assert f"bind: {bind} lets other machines" in refused.message
        assert "--api-key-file FILE" in refused.hint
        assert "--allow-keyless" in refused.hint
        assert plan(bind=bind, allow_keyless=True).bind == bind
        assert plan(bind=bind, api_key_file="/key").bind == bind

    @pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
    def test_this_machine_needs_no_key(self, plan: Make, bind: str) -> None:
        assert not plan(bind=bind).keyed


class TestTensorParallel:
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "tp"),
        [(4, 2, 1), (4, 2, 2), (4, 2, 4), (32, 8, 8), (32, 8, 16), (8, 1, 4), (12, 12, 3)],
    )
    def test_a_tp_that_divides_the_heads_is_accepted(
        self, plan: Make, heads: int, kv_heads: int, tp: int
    ) -> None:
        made = plan(model=model(attention_heads=heads, kv_heads=kv_heads), tp=tp)
        assert made.tp == tp

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "tp"),
        [(4, 2, 3), (4, 2, 8), (32, 8, 3), (32, 8, 5), (24, 8, 6), (14, 2, 4)],
    )
    def test_a_tp_that_does_not_divide_the_heads_is_refused(
        self, plan: Make, heads: int, kv_heads: int, tp: int
    ) -> None:
        shape = model(attention_heads=heads, kv_heads=kv_heads)
        refused = refusal(plan, model=shape, tp=tp)
        assert f"--tp: {tp} " in refused.message
        assert f"{heads} attention heads" in refused.message
        assert f"{kv_heads} KV heads" in refused.message
        suggested = re.search(r"--tp (\d+)", refused.hint)
        assert suggested is not None
        plan(model=shape, tp=int(suggested[1]))

    def test_any_tp_is_accepted_for_an_unknown_model(self, plan: Make) -> None:
        assert plan(model=UNKNOWN_MODEL, tp=3).tp == 3


class TestChunks:
    @pytest.mark.parametrize(("chunk", "block"), [(256, 32), (32, 32), (96, 32), (256, 1), (7, 7)])
    def test_a_chunk_of_whole_blocks_is_accepted(self, plan: Make, chunk: int, block: int) -> None:
        made = plan(lmcache={"chunk_size": chunk}, engine={"block_size": block})
        assert (made.chunk_size, made.block_size) == (chunk, block)

    @pytest.mark.parametrize(
        ("chunk", "block", "better"),
        [
            (100, 32, 96),
            (250, 32, 256),
            (250, 16, 256),
            (16, 32, 32),
            (1, 128, 128),
            (8191, 1000, 8000),
        ],
    )
    def test_a_chunk_that_cuts_a_block_is_refused_with_the_nearest_size(
        self, plan: Make, chunk: int, block: int, better: int
    ) -> None:
        refused = refusal(plan, lmcache={"chunk_size": chunk}, engine={"block_size": block})
        assert f"lmcache.chunk_size: {chunk}" in refused.message
        assert f"engine.block_size {block}" in refused.message
        assert refused.hint == f"set lmcache.chunk_size to {better}"

    @pytest.mark.parametrize(("chunk", "block"), [(8192, 820), (8190, 1000), (1, 1024)])
    def test_the_suggested_size_is_accepted(self, plan: Make, chunk: int, block: int) -> None:
        hint = refusal(plan, lmcache={"chunk_size": chunk}, engine={"block_size": block}).hint
        suggested = int(hint.rsplit(" ", 1)[1])
        plan(lmcache={"chunk_size": suggested}, engine={"block_size": block})


class TestMemory:
    def test_an_engine_is_the_sum_of_its_parts(self, plan: Make) -> None:
        made = plan(engine={"kv_cache_gib": 2}, lmcache={"staging_gib": 1.5})
        expected = made.vendor.engine_base_mib + 2048 + 1536
        assert {engine.memory_mib for engine in made.engines} == {expected}

    def test_the_stack_is_the_sum_of_engines_and_redis(self, plan: Make) -> None:
        made = plan(topology="2p2d", redis={"memory_gib": 3})
        assert made.redis_memory_mib == 3072
        assert made.memory_mib == 3072 + 4 * made.engines[0].memory_mib

    def test_every_rank_has_its_own_kv_space_and_staging(self, plan: Make) -> None:
        """vLLM's --kv-cache-memory-bytes and LMCache's max_local_cpu_size count by rank."""
        one, two = plan(tp=1), plan(tp=2)
        assert two.engines[0].memory_mib == 2 * one.engines[0].memory_mib

    def test_kv_space_is_the_vendors_unless_named(self, plan: Make) -> None:
        block = 32 * KV_BYTES  # which vLLM keeps
        assert plan().kv_cache_bytes == plan().vendor.kv_cache_gib * 2**30 + block
        assert plan(engine={"kv_cache_gib": 2}).kv_cache_bytes == 2 * 2**30 + block

    @pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float16", 1), ("float32", 2)])
    def test_kv_bytes_of_a_token(self, plan: Make, dtype: str, factor: int) -> None:
        assert plan(engine={"dtype": dtype}).kv_bytes_per_token == factor * KV_BYTES

    @pytest.mark.parametrize(
        ("vendor", "fast", "asked", "dtype"),
        [
            ("cpu", True, None, "bfloat16"),
            ("cpu", False, None, "float32"),
            ("cpu", False, "bfloat16", "bfloat16"),
            ("cuda", False, None, "bfloat16"),
        ],
    )
    def test_dtype_is_the_fast_one_unless_named(
        self, plan: Make, vendor: str, fast: bool, asked: str | None, dtype: str
    ) -> None:
        gpus = tuple(Gpu(n, "cuda", "H100", 81559, uuid=f"GPU-{n}") for n in range(2))
        machine = replace(MACHINE, fast_bfloat16=fast, gpus=gpus)
        made = plan(vendor=vendor, machine=machine, engine={"dtype": asked})
        assert made.dtype == dtype
        assert made.kv_bytes_per_token == KV_BYTES * (2 if dtype == "float32" else 1)

    def test_kv_bytes_are_unknown_with_the_model(self, plan: Make) -> None:
        assert plan(model=UNKNOWN_MODEL).kv_bytes_per_token is None


class TestContext:
    def test_the_context_is_that_of_the_model(self, plan: Make) -> None:
        assert plan().max_model_len == 32768

    def test_the_context_fits_the_kv_space(self, plan: Make) -> None:
        made = plan(engine={"kv_cache_gib": 2**-7})  # 8 MiB
        assert made.max_model_len == 2**23 // KV_BYTES

    def test_a_model_without_a_limit_has_the_context_of_the_kv_space(self, plan: Make) -> None:
        made = plan(model=model(max_positions=None), engine={"kv_cache_gib": 0.5})
        assert made.max_model_len == 2**29 // KV_BYTES

    def test_a_given_context_is_kept(self, plan: Make) -> None:
        assert plan(engine={"max_model_len": 4096}).max_model_len == 4096

    def test_a_context_longer_than_the_model_is_refused(self, plan: Make) -> None:
        assert plan(engine={"max_model_len": 32768}).max_model_len == 32768
        refused = refusal(plan, engine={"max_model_len": 32769})
        assert "engine.max_model_len: 32769" in refused.message
        assert "32768" in refused.hint

    def test_a_context_larger_than_the_kv_space_is_refused(self, plan: Make) -> None:
        """The engine would refuse it too, but only after it loaded the model."""
        refused = refusal(plan, engine={"kv_cache_gib": 2**-7, "max_model_len": 8192})
        assert "engine.max_model_len" in refused.message
        assert "kv_cache_gib" in refused.message + refused.hint

    def test_a_context_shorter_than_a_chunk_is_refused(self, plan: Make) -> None:
        """Nothing would ever be shared, and `check` could only fail after the whole start."""
        refused = refusal(plan, engine={"max_model_len": 128}, lmcache={"chunk_size": 256})
        assert "chunk_size" in refused.message

    @pytest.mark.parametrize("model", [model(), UNKNOWN_MODEL])
    def test_a_context_needs_room_for_a_chunk_and_an_answer(self, plan: Make, model: Model) -> None:
        fields = {"model": model, "lmcache": {"chunk_size": 256}}
        refused = refusal(plan, engine={"max_model_len": 271}, **fields)
        assert "engine.max_model_len: a context of 271 tokens" in refused.message
        assert "an answer of 16" in refused.message
        assert "set engine.max_model_len to 272 or more" in refused.hint
        assert plan(engine={"max_model_len": 272}, **fields).max_model_len == 272

    def test_kv_space_smaller_than_a_chunk_is_refused(self, plan: Make) -> None:
        refused = refusal(plan, engine={"kv_cache_gib": 2**-21})  # 512 bytes
        assert "kv_cache_gib" in refused.message

    def test_unknown_model_leaves_it_to_the_engine(self, plan: Make) -> None:
        assert plan(model=UNKNOWN_MODEL).max_model_len is None
        assert plan(model=UNKNOWN_MODEL, engine={"max_model_len": 999}).max_model_len == 999


def test_planning_twice_gives_the_same_plan(plan: Make) -> None:
    assert plan(topology="2p2d", tp=2) == plan(topology="2p2d", tp=2)
