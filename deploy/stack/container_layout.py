"""A stack in the containers of one Compose project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.assets import Kit
from deploy.planning.engines import EnginePlan
from deploy.planning.kv_server import KvServerPlan
from deploy.planning.plan import Plan
from deploy.planning.redis import RedisPlan
from deploy.stack.containers import in_container
from deploy.stack.layout import (
    CONNECTOR,
    DRAINED,
    ENGINE_CACHE,
    ENGINE_PORT,
    EVERYWHERE,
    GRAFANA_HOME,
    HUB_CACHE,
    HUB_TOKEN,
    KV_PAGES,
    MODELS,
    MONITORING,
    MONITORING_DATA,
    ROUTER,
    ROUTER_CONTROL,
    SECRETS,
    SHARED_MEMORY,
    Endpoint,
    FilePlace,
)
from deploy.stack.service import Service

_ROUTER_PORT = 8000
_ROUTER_METRICS_PORT = 9000
_KV_METRICS_PORT = 9000
_REDIS_PORT = 6379
_PROMETHEUS_PORT = 9090
_GRAFANA_PORT = 3000
# Of processes and threads: an engine starts its workers with a few hundred of them. Kernels count
# to 32,768 at least.
_NUMBERS = 2048


@dataclass(frozen=True)
class ContainerImages:
    """The images of a stack.

    Attributes:
        engine_id: the content of the engine image, such as 'sha256:…'; "" if unknown.
        prometheus, grafana: "" if they are not wanted.
        engine_program, router_program: the interpreters in them.
    """

    engine: str
    router: str
    redis: str
    engine_program: str
    router_program: str
    engine_id: str = ""
    prometheus: str = ""
    grafana: str = ""


@dataclass(frozen=True)
class ContainerLayout:
    """Containers of one Compose project, reached by their names.

    Attributes:
        run_dir: on this machine; holds one folder a service, for its configuration files.
        user: 'uid:gid' that every container runs as.
        engine_cache: on this machine; what engines of this image compile or look up once.
        hub_cache: on this machine; None if the model does not come from a hub.
        hub_token: whether there is a secret with a token of the hub.
        sees_all_gpus: containers are given every GPU, and told which are an engine's.
    """

    run_dir: Path
    images: ContainerImages
    user: str
    kit: Kit
    engine_cache: Path
    hub_cache: Path | None = None
    hub_token: bool = False
    sees_all_gpus: bool = False

    # In memory that only engines and server share.
    kv_requests = f"{SHARED_MEMORY}/kv.sock"
    shared_memory = "pdkit"
    redis_program = "redis-server"
    prometheus_program = "/bin/prometheus"
    grafana_program = f"{GRAFANA_HOME}/bin/grafana"
    monitoring_dir = MONITORING
    connector_dir = CONNECTOR
    router_dir = ROUTER
    versions = (None, None)  # the image's content stands for them

    @property
    def software_identity(self) -> str:
        return f"{self.images.engine} {self.images.engine_id}".strip()

    @property
    def engine_program(self) -> str:
        return self.images.engine_program

    @property
    def router_program(self) -> str:
        return self.images.router_program

    def redis(self, shard: RedisPlan) -> Endpoint:
        return _in_network(shard.name, _REDIS_PORT)

    def redis_socket(self, shard: RedisPlan) -> str:  # noqa: ARG002 - they share no folder
        return ""

    def kv_server_env(self, plan: Plan) -> dict[str, str]:
        return {**self.temp_env, **_process_numbers(plan, 0)}

    def kv_metrics(self, server: KvServerPlan) -> Endpoint:
        return _in_network(server.name, _KV_METRICS_PORT)

    def engine(self, engine: EnginePlan) -> Endpoint:
        return _in_network(engine.name, ENGINE_PORT)

    def engine_source(self, role: str) -> str:  # noqa: ARG002 - the plan has all of them
        return ""

    def router(self, plan: Plan) -> Endpoint:  # noqa: ARG002 - only processes' ports are planned
        return _in_network("router", _ROUTER_PORT)

    def router_metrics(self, plan: Plan) -> Endpoint:  # noqa: ARG002 - only processes' ports are planned
        return _in_network("router", _ROUTER_METRICS_PORT)

    def prometheus(self, plan: Plan) -> Endpoint:  # noqa: ARG002 - only processes' ports are planned
        return _in_network("prometheus", _PROMETHEUS_PORT)

    def grafana(self, plan: Plan) -> Endpoint:  # noqa: ARG002 - only processes' ports are planned
        return _in_network("grafana", _GRAFANA_PORT)

    @property
    def kv_pages(self) -> FilePlace:
        return FilePlace(str(self.run_dir / "kv-server" / "pages" / "sock"), f"{KV_PAGES}/sock")

    @property
    def temp_env(self) -> dict[str, str]:
        # The user has no entry in the image's list of users.
        return {"TMPDIR": "/tmp", "HOME": "/tmp", "USER": "pdkit", "LOGNAME": "pdkit"}  # noqa: S108 - of a container

    @property
    def drain_file(self) -> FilePlace:
        return FilePlace(str(self.run_dir / "router" / DRAINED), f"{ROUTER_CONTROL}/{DRAINED}")

    def secret(self, name: str) -> str:
        return str(SECRETS / name)

    def file(self, service: str, name: str) -> FilePlace:
        return FilePlace(str(self.run_dir / service / name), str(SECRETS / name))

    def data_dir(self, service: str) -> str:  # noqa: ARG002 - each has a container
        return MONITORING_DATA

    def redis_dir(self, shard: RedisPlan) -> str:  # noqa: ARG002 - each has a container
        return "/tmp"  # noqa: S108 - the container's own

    def model_ref(self, plan: Plan) -> str:
        if plan.model.source == "hub":
            return plan.model.ref
        return str(MODELS / Path(plan.model.ref).name)

    def engine_env(self, engine: EnginePlan, plan: Plan) -> dict[str, str]:
        env = {**self.temp_env, "VLLM_CACHE_ROOT": f"{ENGINE_CACHE}/vllm"}
        visible = plan.vendor.container.visible
        if visible and engine.gpus:
            own = engine.devices if self.sees_all_gpus else range(len(engine.gpus))
            env[visible] = ",".join(map(str, own))
        numbers = _process_numbers(plan, plan.engines.index(engine) + 1)
        return {**env, **_home_env(engine, plan), **numbers, **self._hub_env(plan)}

    def placed(self, service: Service, plan: Plan) -> Service:
        return in_container(service, plan, self)

    def _hub_env(self, plan: Plan) -> Mapping[str, str]:
        if plan.model.source != "hub":
            return {}
        token = {"HF_TOKEN_PATH": str(SECRETS / HUB_TOKEN)} if self.hub_token else {}
        return {"HF_HUB_CACHE": HUB_CACHE, **token}


def _home_env(engine: EnginePlan, plan: Plan) -> dict[str, str]:
    """Name an engine's home, below which Triton, FlashInfer, AITER and CUDA keep what they compile.

    On GPUs it outlives the container. Each engine has its own: AITER copies itself there at its
    first start, and one engine could meet another's copy half done.
    """
    if not plan.vendor.has_gpus:
        return {}
    home = f"{ENGINE_CACHE}/{engine.name}"
    # Not below the home, if left out, but in the temporary folder, which is memory.
    return {"HOME": home, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor"}


def _process_numbers(plan: Plan, place: int) -> dict[str, str]:
    """Return the numbers of a container's processes, by its place among those that share KV.

    GPU drivers tell processes that share memory apart by number, and containers all count from 1.
    """
    if not (plan.kv_server and plan.vendor.has_gpus):
        return {}
    first = _NUMBERS * place
    return {"PDKIT_PROCESS_NUMBERS": f"{first or 1}-{first + _NUMBERS - 1}"}


def _in_network(name: str, port: int) -> Endpoint:
    return Endpoint(EVERYWHERE, port, f"{name}:{port}")
