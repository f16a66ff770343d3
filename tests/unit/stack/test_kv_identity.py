"""Keys of the store: shared by all engines of a stack, and by no other kind of KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
from pydantic import BaseModel

from deploy.config.engine_inputs import ARGUMENTS, CHANGES_KV, VARIABLES
from deploy.config.fields import TracingSpec
from deploy.config.kinds import kind_of
from deploy.config.spec import SettledSpec, StackSpec
from deploy.planning.inventory import Inventory
from deploy.stack import kv_identity as module
from deploy.stack.containers import ContainerLayout
from deploy.stack.kv_identity import ROWS, hash_seed, kv_identity
from deploy.stack.layout import Layout
from deploy.stack.service import Service
from deploy.workflows.prepare import Prepared, prepare
from deploy.workflows.saved_state import restored_facts
from deploy.workflows.software import Containers
from tests.unit.conftest import HOME, KIT
from tests.unit.stack.cases import FOLDER_MODEL, machine_with
from tests.unit.stack.conftest import Case

Make = Callable[..., Case]


def seeds(prepared: Prepared) -> set[str]:
    return {
        service.env["PYTHONHASHSEED"]
        for service in prepared.stack.services
        if service.role in ("producer", "consumer")
    }


def seed(prepared: Prepared) -> str:
    (only,) = seeds(prepared)
    return only


USUAL: dict[str, Any] = {"given": FOLDER_MODEL}
DIFFERENT: dict[str, dict[str, Any]] = {
    "the stack": {"name": "other"},
    "the vendor": {"vendor": "rocm"},
    "the image": {"image": "mine/vllm:1"},
    "the model": {"given": replace(FOLDER_MODEL, source="hub", ref="owner/other")},
    "the model's content": {"given": replace(FOLDER_MODEL, version="fedcba9876543210")},
    "the content of a model in the hub's cache": {
        "given": replace(
            FOLDER_MODEL, source="hub", ref="owner/other", files=(("m.safetensors", 1, "ab"),)
        )
    },
    "an adapter's content": {
        "given": replace(FOLDER_MODEL, named=(("/adapter/adapter_model.safetensors", 1, "ab"),))
    },
    "the type of numbers": {"engine": {"dtype": "float16"}},
    "the number of ranks": {"tp": 2},
    "the block": {"engine": {"block_size": 32}},
    "the chunk": {"lmcache": {"chunk_size": 512}},
    # Models with LongRoPE choose their frequencies by it.
    "the context": {"engine": {"max_model_len": 4096}},
    "the context that memory leaves": {"engine": {"kv_cache_gib": 5}},
    "layer by layer": {"layerwise": True},
    "an argument": {"engine": {"args": ["--kv-cache-dtype", "fp8"]}},
    "another argument": {"engine": {"args": ["--kv-cache-dtype", "auto"]}},
    "a pin taken off": {"engine": {"args": ["--async-scheduling"]}},
    "another pin taken off": {"engine": {"env": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}},
    "a variable": {"engine": {"env": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}}},
}
ALIKE: dict[str, dict[str, Any]] = {
    "the same bytes in another folder": {
        "given": replace(FOLDER_MODEL, ref="/mnt/Other", served_name="Other")
    },
    "a limit of the scheduler": {"engine": {"args": ["--max-num-seqs", "7"]}},
    "the same in another spelling": {"engine": {"args": ["--max_num_seqs=9"]}},
    "what is logged": {"engine": {"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}}},
    "a flag that is switched off": {"engine": {"args": ["--no-enable-log-requests"]}},
    "ports": {"port": 9000},
    "the address": {"bind": "0.0.0.0", "allow_keyless": True},  # noqa: S104 - not bound here
    "patience": {"timeouts": {"ready_s": 5}},
    "the number of engines": {"topology": "2p3d"},
    "the store's size": {"redis": {"memory_gib": 9}},
    "the staging": {"lmcache": {"staging_gib": 1}},
    "the space": {"engine": {"kv_cache_gib": 20}},
    "the share": {"engine": {"gpu_memory": 0.5}},
    "the collector of traces": {"tracing": {"otlp_endpoint": "http://172.17.0.1:4318"}},
    "what consumers save": {"save_decode_cache": True},
    "which GPUs": {"machine": machine_with("cuda", 4, 5)},
    "how GPUs are given": {"gpu_access": "cdi"},
    "the other images": {"redis": {"image": "redis:7"}, "router": {"image": "mine/router:1"}},
    "one GPU for all": {"gpus": 1},
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_other_kv_has_other_keys(contained: Make, change: str) -> None:
    fields = {**USUAL, **DIFFERENT[change]}
    assert seed(contained(**fields).prepared) != seed(contained(**USUAL).prepared)


def test_different_kv_has_different_keys(contained: Make) -> None:
    every = [seed(contained(**{**USUAL, **fields}).prepared) for fields in DIFFERENT.values()]
    assert len(set(every)) == len(DIFFERENT)


@pytest.mark.parametrize("change", ALIKE)
def test_the_same_kv_has_the_same_keys(contained: Make, change: str) -> None:
    fields = {**USUAL, **ALIKE[change]}
    assert seed(contained(**fields).prepared) == seed(contained(**USUAL).prepared)


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "LMCache's server": {"connector": "lmcache-mp"},
    "traces": {"tracing": {"otlp_endpoint": "http://172.17.0.1:4318"}},
    "aggregated": {"topology": "2a+redis"},
}


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [
        (vendor, kind)
        for vendor in ("cpu", "cuda", "rocm")
        for kind in PLANS
        # LMCache's server cannot reach engines in other containers there.
        if (vendor, kind) != ("rocm", "LMCache's server")
    ],
)
def test_engines_of_a_stack_agree(contained: Make, vendor: str, kind: str) -> None:
    made = contained(**{"vendor": vendor, "topology": "2p3d", **USUAL, **PLANS[kind]}).prepared
    every = [kv_identity(engine, made.plan, made.layout) for engine in made.plan.engines]
    assert all(one == every[0] for one in every)


def test_hosts_of_a_stack_agree(prepared: Callable[..., Prepared]) -> None:
    """One has the producers, the other the consumers, more cores and other ports and folders."""

    def host(cpus: int, port: int, **fields: Any) -> Prepared:
        return prepared(
            given=FOLDER_MODEL,
            machine=Inventory(cpus=cpus, memory_mib=65536),
            redis={"url_file": "/home/user/redis-url"},
            port=port,
            **fields,
        )

    engines = [{"role": "producer", "url": "http://10.0.0.1:8010"}]
    bound = {"engine": {"bind": "10.0.0.1", "key_file": "/home/user/engine-key"}}
    first = host(8, 8000, producers=1, consumers=0, **bound)
    second = host(
        32,
        9000,
        producers=0,
        consumers=2,
        router={"engines": engines},
        engine={"key_file": "/home/user/engine-key"},
    )
    assert hash_seed(first.plan, first.layout) == hash_seed(second.plan, second.layout)


def options_of(argv: Iterable[str]) -> set[str]:
    return {argument for argument in argv if argument.startswith("-")}


def engines_of(made: Prepared) -> list[Service]:
    return [one for one in made.stack.services if one.role in ("producer", "consumer")]


@pytest.mark.parametrize("runtime", ["process", "compose"])
@pytest.mark.parametrize("vendor", ["cpu", "cuda", "rocm"])
def test_what_the_plan_gives_engines_is_in_the_identity_or_has_a_reason(
    contained: Make, runtime: str, vendor: str
) -> None:
    made = contained(vendor=vendor, runtime=runtime, **USUAL).prepared
    found = kv_identity(made.plan.engines[0], made.plan, made.layout)
    planned, env = (
        cast("list[list[str]]", found["planned_args"]),
        cast("dict[str, str]", found["env"]),
    )
    hashed = {option for option, *_ in planned}
    left_out = {name for name, row in {**ARGUMENTS, **VARIABLES}.items() if row.unrelated}
    for service in engines_of(made):
        assert options_of(service.argv) - hashed <= left_out
        assert service.env.keys() - env.keys() <= left_out | {"PYTHONPATH"}
    assert {"--dtype", "--block-size", "--tensor-parallel-size"} <= hashed
    assert not hashed & left_out and not env.keys() & left_out
    assert found.keys() == ROWS.keys()


def test_a_new_argument_or_variable_of_the_plan_is_in_the_identity(
    contained: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = contained(**USUAL).prepared
    argv, env = module.planned_argv, module.engine_env
    before = hash_seed(made.plan, made.layout)
    monkeypatch.setattr(module, "planned_argv", lambda *args: (*argv(*args), "--new", "1"))
    with_argument = hash_seed(made.plan, made.layout)
    monkeypatch.setattr(module, "engine_env", lambda *args: {**env(*args), "NEW": "1"})
    assert len({before, with_argument, hash_seed(made.plan, made.layout)}) == 3


def identity_with(made: Prepared, **engine: Any) -> str:
    """Return the identity of a stack whose users give engines something else."""
    changed = made.plan.spec.engine.model_copy(update=engine)
    spec = SettledSpec(made.plan.spec.model_copy(update={"engine": changed}))
    plan = replace(made.plan, spec=spec)
    return json.dumps(kv_identity(plan.engines[0], plan, made.layout), sort_keys=True)


@pytest.mark.parametrize("spelling", ["{0} {1}", "{0}={1}", "underscores"])
def test_two_values_of_an_argument_are_two_identities_unless_it_has_a_reason(
    contained: Make, spelling: str
) -> None:
    made = contained(**USUAL).prepared

    def given(name: str, value: str) -> str:
        if spelling == "underscores":
            name, form = f"--{name[2:].replace('-', '_')}", "{0} {1}"
        else:
            form = spelling
        return identity_with(made, args=tuple(form.format(name, value).split()))

    for name, row in ARGUMENTS.items():
        if name.startswith("--"):
            alike = given(name, "1") == given(name, "2")
            assert alike is bool(row.unrelated), name


def test_two_values_of_a_variable_are_two_identities_unless_it_has_a_reason(
    contained: Make,
) -> None:
    made = contained(**USUAL).prepared
    for name, row in {**VARIABLES, "PYTHONPATH": CHANGES_KV, "NEW": CHANGES_KV}.items():
        alike = identity_with(made, env={name: "1"}) == identity_with(made, env={name: "2"})
        assert alike is bool(row.unrelated), name


def test_what_vllm_may_not_take_as_the_value_is_not_left_out(contained: Make) -> None:
    made = contained(**USUAL).prepared
    every = {
        identity_with(made, args=args)
        for args in (
            ("--max-num-seqs", "7"),
            ("--max-num-seqs", "7", "other"),
            ("--max-num-seqs", "7", "-q", "awq"),
            ("--max-num-s", "7"),  # vLLM takes it; the kit does not know it
            ("--new", "7"),
        )
    }
    assert len(every) == 5


def test_every_seed_is_one_that_python_takes(contained: Make) -> None:
    for fields in DIFFERENT.values():
        assert 0 <= int(seed(contained(**{**USUAL, **fields}).prepared)) < 2**32


def test_the_order_of_variables_does_not_count(contained: Make) -> None:
    one, other = ({"A": "1", "B": "2"}, {"B": "2", "A": "1"})
    first, second = (contained(engine={"env": env}, **USUAL).prepared for env in (one, other))
    assert seed(first) == seed(second)


def test_the_content_of_an_image_counts_beside_its_name(contained: Make) -> None:
    """The same tag, pulled or built again, may hold another version."""
    made = contained(**USUAL).prepared
    software = made.facts.software
    assert isinstance(software, Containers)

    def layout(engine_id: str) -> Layout:
        images = replace(software.images, engine_id=engine_id)
        run_dir = HOME.stack("pdkit").run_dir
        return ContainerLayout(run_dir, images, "1:1", KIT, HOME.cache)

    one, same, other = (
        hash_seed(made.plan, layout(text)) for text in ("sha256:a", "sha256:a", "sha256:b")
    )
    assert one == same != other


def test_stacks_with_other_pins_do_not_share_keys(contained: Make) -> None:
    made = contained(**USUAL).prepared
    vendor = made.plan.vendor
    rows = [
        vendor,
        *(replace(vendor, pins=(pin,)) for pin in vendor.pins),
        replace(vendor, pins=()),
    ]
    layout = ContainerLayout(
        HOME.stack("pdkit").run_dir,
        made.facts.software.images,
        "1:1",
        KIT,
        HOME.cache,
    )
    every = {hash_seed(replace(made.plan, vendor=row), layout) for row in rows}
    assert len(every) == len(rows)


def test_processes_and_containers_do_not_share_keys(
    contained: Make, prepared: Callable[..., Prepared]
) -> None:
    machine = Inventory(cpus=16, memory_mib=65536)
    alike = {"vendor": "cpu", "machine": machine, "given": FOLDER_MODEL}
    assert seed(prepared(**alike)) != seed(contained(**alike).prepared)


class TestVersions:
    """Of processes: another environment of Python may hold other versions."""

    @pytest.mark.parametrize("other", [("0.33.0", "0.5.6"), ("0.32.0", "0.5.7")])
    def test_other_versions_have_other_keys(
        self, prepared: Callable[..., Prepared], other: tuple[str, str]
    ) -> None:
        one, same, changed = (
            seed(prepared(given=FOLDER_MODEL, versions=versions))
            for versions in (("0.32.0", "0.5.6"), ("0.32.0", "0.5.6"), other)
        )
        assert one == same != changed

    def test_a_plan_without_engines_can_be_shown(self, prepared: Callable[..., Prepared]) -> None:
        made = prepared(given=FOLDER_MODEL)
        assert made.layout.software_identity.count("unknown until engines are here") == 2

    def test_a_restored_stack_has_the_same_keys(self, prepared: Callable[..., Prepared]) -> None:
        made = prepared(given=FOLDER_MODEL, versions=("0.32.0", "0.5.6"))
        stored = json.loads(json.dumps(asdict(made.facts)))
        again = prepare(made.spec, HOME, restored_facts(stored), model=made.model, kit=KIT)
        assert hash_seed(again.plan, again.layout) == hash_seed(made.plan, made.layout)


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LONG = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


class TestContext:
    """KV depends on the maximum length for some models; in doubt it does."""

    @pytest.mark.parametrize(
        ("config", "identities"),
        [
            (QWEN3, 1),
            ({**QWEN3, "rope_scaling": None}, 1),
            ({**QWEN3, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 1),
            ({**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1),
            ({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
              "rope_scaling": LLAMA3}, 1),
            ({**QWEN3, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2),
            ({**QWEN3, "rope_scaling": {"rope_type": "yarn", "type": "longrope"}}, 2),
            ({**QWEN3, "rope_scaling": "yarn"}, 2),
            ({**QWEN3, "rope_parameters": {"full_attention": LONG}}, 2),
            ({**QWEN3, "dual_chunk_attention_config": {"chunk_size": 8}}, 2),
            ({**QWEN3, "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, 2),
            ({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
              "rope_scaling": LONG}, 2),
            ({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
              "rope_scaling": LONG}, 2),
            ({"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}, 2),
            ({"architectures": ["Llama4ForCausalLM"], "model_type": "llama"}, 2),
            ({"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}, 2),
            ({"architectures": ["NewForCausalLM"], "model_type": "new"}, 2),
            ({"architectures": ["NewForCausalLM"], "model_type": "qwen3"}, 2),
            ({"model_type": "qwen3"}, 2),
            ({}, 2),
        ],
    )  # fmt: skip
    def test_it_separates_only_where_positions_may_depend_on_it(
        self, contained: Make, config: dict[str, Any], identities: int
    ) -> None:
        model = replace(FOLDER_MODEL, kind=kind_of(config))
        every = {
            seed(contained(given=model, engine={"max_model_len": length}).prepared)
            for length in (2048, 4096)
        }
        assert len(every) == identities

    @pytest.mark.parametrize(
        ("args", "identities"),
        [
            (["--max-num-seqs", "7"], 1),
            (["--kv-cache-dtype", "fp8"], 1),
            (["--trust-remote-code"], 2),
            (["--hf-overrides", '{"rope_scaling": {"rope_type": "longrope"}}'], 2),
            (["--hf_overrides.rope_scaling.rope_type", "longrope"], 2),
            (["--hf-o", "{}"], 2),
            (["--new"], 2),
        ],
    )
    def test_an_argument_that_may_change_the_model_brings_it_back(
        self, contained: Make, args: list[str], identities: int
    ) -> None:
        model = replace(FOLDER_MODEL, kind=kind_of(QWEN3))
        every = {
            seed(contained(given=model, engine={"args": args, "max_model_len": n}).prepared)
            for n in (2048, 4096)
        }
        assert len(every) == identities


# For each setting of `deploy.yaml` that changes KV, two values, which need what else is given.
CHANGING_FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "name": ({}, {"name": "other"}),
    "vendor": ({}, {"vendor": "rocm"}),
    "runtime": ({}, {"runtime": "process"}),
    "tp": ({}, {"tp": 2}),
    "image": ({}, {"image": "mine/vllm:1"}),
    "model": (DIFFERENT["the model"], DIFFERENT["the model's content"]),
    "connector": ({}, {"connector": "lmcache-mp"}),
    "layerwise": ({}, {"layerwise": True}),
    "engine.python": (
        {"runtime": "process", "versions": ("0.32.0", "0.5.6")},
        {"runtime": "process", "versions": ("0.33.0", "0.5.6")},
    ),
    "engine.dtype": ({}, {"engine": {"dtype": "float16"}}),
    "engine.block_size": ({}, {"engine": {"block_size": 32}}),
    "engine.max_model_len": ({}, {"engine": {"max_model_len": 4096}}),
    "engine.args": ({}, {"engine": {"args": ["--kv-cache-dtype", "fp8"]}}),
    "engine.env": ({}, {"engine": {"env": {"VLLM_MLA_DISABLE": "1"}}}),
    "lmcache.chunk_size": ({}, {"lmcache": {"chunk_size": 512}}),
}
# The others, and why two values mean the same KV.
OTHER_FIELDS: dict[str, str] = {
    "how many engines there are, and on which GPUs": "gpus topology producers consumers gpu_access",
    "where files, programs and credentials are": "hub_cache hf_token_file api_key_file "
    "engine.key_file redis.server redis.url_file redis.tls_files",
    "how clients and services are reached": "port bind allow_keyless engine.bind router.engines",
    "how much fits; the context that follows has a row": "engine.kv_cache_gib engine.gpu_memory "
    "engine.memory_gib lmcache.staging_gib lmcache.server_gib redis.memory_gib redis.shards",
    "another client or envelope names other objects, or refuses them": "redis.client "
    "redis.integrity",
    "what is stored, not what it means": "save_decode_cache",
    "services that compute no KV": "redis.image router.image router.degrade router.max_body_mib "
    "monitoring supervise",
    "permission for versions, which have a row": "allow_untested",
    "time limits and what is watched": "timeouts.ready_s timeouts.stop_s timeouts.hung_s "
    "timeouts.stuck_s slo.ttft_s slo.itl_s",
    "where traces go": " ".join(f"tracing.{name}" for name in TracingSpec.model_fields),
}


def fields_of(spec: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in spec.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields_of(kind, f"{name}.")
        else:
            yield before + name


def test_every_setting_is_said_to_change_kv_or_not() -> None:
    others = [name for names in OTHER_FIELDS.values() for name in names.split()]
    assert sorted([*CHANGING_FIELDS, *others]) == sorted(fields_of(StackSpec)), (
        "say in this file whether a new setting changes KV"
    )


@pytest.mark.parametrize("field", CHANGING_FIELDS)
def test_two_values_of_a_setting_that_changes_kv_are_two_identities(
    contained: Make, field: str
) -> None:
    one, other = (
        seed(contained(**{**USUAL, **given}).prepared) for given in CHANGING_FIELDS[field]
    )
    assert one != other
