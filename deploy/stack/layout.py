"""Where the parts of a stack lie: on this machine as processes, or in containers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from deploy.planning.address import host_port
from deploy.planning.plan import EnginePlan, Plan
from deploy.planning.redis import RedisPlan

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - of a container's own network, on which only its stack is
WILDCARDS = (EVERYWHERE, "::")  # which a client of this machine reaches on loopback
SECRETS = PurePosixPath("/run/secrets")
ENGINE_KEY = "engine_key"
KV_KEY = "kv_key"
HUB_TOKEN = "hf_token"  # noqa: S105 - the name of the secret, not the secret
CONNECTOR = "/opt/pdkit/connector"
ROUTER = "/opt/pdkit/router"
ROUTER_CONTROL = "/run/pdkit-router"
DRAINED = "drained"
MONITORING = "/opt/pdkit/monitoring"
MONITORING_DATA = "/data"
# Where Grafana's image, and its packages for Debian and Red Hat, put what it serves.
GRAFANA_HOME = "/usr/share/grafana"
MODELS = PurePosixPath("/models")
HUB_CACHE = "/hub"
ENGINE_CACHE = "/cache"

ENGINE_PORT = 8000
_ROUTER_PORT = 8000
_ROUTER_METRICS_PORT = 9000
_REDIS_PORT = 6379
_PROMETHEUS_PORT = 9090
_GRAFANA_PORT = 3000


@dataclass(frozen=True)
class Endpoint:
    """Where a service listens, and where others reach it."""

    bind: str
    port: int
    reached_at: str


@dataclass(frozen=True)
class FilePlace:
    """A configuration file: where it lies on this machine, and where its service sees it."""

    path: str
    target: str

    @property
    def seen_at(self) -> str:
        return self.target or self.path


class Layout(Protocol):
    """What differs between processes and containers while services are put together."""

    @property
    def redis_program(self) -> str: ...
    @property
    def engine_program(self) -> str: ...
    @property
    def router_program(self) -> str: ...
    @property
    def connector_dir(self) -> str: ...
    @property
    def router_dir(self) -> str: ...
    @property
    def prometheus_program(self) -> str: ...
    @property
    def grafana_program(self) -> str:
        """Grafana's server; "" where there is none."""
        ...

    @property
    def monitoring_dir(self) -> str:
        """Where services see the folder of rules and dashboards."""
        ...

    @property
    def image_identity(self) -> str:
        """What tells one engine image from another; "" for processes."""
        ...

    def redis(self, shard: RedisPlan) -> Endpoint: ...
    def redis_socket(self, shard: RedisPlan) -> str:
        """Return the Unix socket by which engines reach Redis; "" where they share no folder."""
        ...

    @property
    def kv_sockets(self) -> tuple[str, str]:
        """Return the Unix sockets of LMCache's server, for engines' requests and for its pages."""
        ...

    @property
    def shared_memory(self) -> str:
        """Return what the names of the stack's shared memory begin with."""
        ...

    def engine(self, engine: EnginePlan) -> Endpoint: ...
    def engine_source(self, role: str) -> str:
        """Return the URL by which the router finds a role's engines; "" where it is told each."""
        ...

    def router(self, plan: Plan) -> Endpoint: ...
    def router_metrics(self, plan: Plan) -> Endpoint: ...
    def prometheus(self, plan: Plan) -> Endpoint: ...
    def grafana(self, plan: Plan) -> Endpoint: ...
    @property
    def drain_file(self) -> FilePlace:
        """The file with the engines that the router leaves alone."""
        ...

    def secret(self, name: str) -> str:
        """Return where a service sees the file of a secret."""
        ...

    def file(self, service: str, name: str) -> FilePlace: ...
    def data_dir(self, service: str) -> str:
        """Return where a monitoring service keeps what it records."""
        ...

    def redis_dir(self, shard: RedisPlan) -> str: ...
    def model_ref(self, plan: Plan) -> str: ...
    def engine_env(self, engine: EnginePlan, plan: Plan) -> dict[str, str]: ...


@dataclass(frozen=True)
class ProcessLayout:
    """Processes of this machine, on its loopback address unless the user names another.

    Attributes:
        run_dir: holds one folder a service, for its configuration files.
        secrets_dir: holds one file a secret.
        temp_dir: the engines' own, sockets among it; a short path, since those are limited.
        engine_python: the interpreter that has vLLM, LMCache and the router.
        hub_cache, hub_token: a folder for models of the hub, and a file with a token, where the
            user names them.
    """

    run_dir: Path
    secrets_dir: Path
    temp_dir: Path
    engine_python: str
    redis_server: str
    connector: Path
    router_code: Path
    hub_cache: Path | None = None
    hub_token: Path | None = None
    monitoring: Path = Path()
    prometheus_program: str = ""
    grafana_program: str = ""

    image_identity = ""

    @property
    def monitoring_dir(self) -> str:
        return str(self.monitoring)

    @property
    def redis_program(self) -> str:
        return self.redis_server

    @property
    def engine_program(self) -> str:
        return self.engine_python

    @property
    def router_program(self) -> str:
        return self.engine_python

    @property
    def connector_dir(self) -> str:
        return str(self.connector)

    @property
    def router_dir(self) -> str:
        return str(self.router_code)

    def redis(self, shard: RedisPlan) -> Endpoint:
        return _on_loopback(shard.port)

    def redis_socket(self, shard: RedisPlan) -> str:
        return str(self.temp_dir / f"{shard.name}.sock")

    @property
    def kv_sockets(self) -> tuple[str, str]:
        return str(self.temp_dir / "kv.sock"), str(self.temp_dir / "kv-pages.sock")

    @property
    def shared_memory(self) -> str:
        return self.temp_dir.name

    def engine(self, engine: EnginePlan) -> Endpoint:
        host = LOOPBACK if engine.host in WILDCARDS else engine.host
        return Endpoint(engine.host, engine.port, host_port(host, engine.port))

    def engine_source(self, role: str) -> str:  # noqa: ARG002 - the plan has all of them
        return ""

    def router(self, plan: Plan) -> Endpoint:
        return Endpoint(plan.bind, plan.port, host_port(plan.bind, plan.port))

    def secret(self, name: str) -> str:
        return str(self.secrets_dir / name)

    def router_metrics(self, plan: Plan) -> Endpoint:
        return _on_loopback(plan.router_metrics_port)

    def prometheus(self, plan: Plan) -> Endpoint:
        return _on_loopback(plan.prometheus_port)

    def grafana(self, plan: Plan) -> Endpoint:
        return _on_loopback(plan.grafana_port)

    @property
    def drain_file(self) -> FilePlace:
        return FilePlace(str(self.run_dir / "router" / DRAINED), "")

    def file(self, service: str, name: str) -> FilePlace:
        return FilePlace(str(self.run_dir / service / name), "")

    def data_dir(self, service: str) -> str:
        return str(self.run_dir / service / "data")

    def redis_dir(self, shard: RedisPlan) -> str:
        return str(self.run_dir / shard.name)

    def model_ref(self, plan: Plan) -> str:
        return plan.model.ref

    def engine_env(self, engine: EnginePlan, plan: Plan) -> dict[str, str]:
        visible = plan.vendor.visible_devices
        given = {visible: ",".join(map(str, engine.devices))} if visible else {}
        hub = {"HF_HUB_CACHE": self.hub_cache, "HF_TOKEN_PATH": self.hub_token}
        named = {name: str(path) for name, path in hub.items() if path}
        return {"TMPDIR": str(self.temp_dir), **named, **plan.vendor.process_env, **given}


@dataclass(frozen=True)
class ContainerImages:
    """The images of a stack.

    Attributes:
        engine_id: the content of the engine image, such as 'sha256:…'; "" where nobody looked.
        prometheus, grafana: "" where they are not wanted.
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
        hub_cache: on this machine; None where the model does not come from a hub.
        hub_token: whether there is a secret with a token of the hub.
        sees_all_gpus: containers are given every GPU, and told which are an engine's.
    """

    run_dir: Path
    images: ContainerImages
    user: str
    connector: Path
    router_code: Path
    engine_cache: Path
    monitoring: Path = Path()
    hub_cache: Path | None = None
    hub_token: bool = False
    sees_all_gpus: bool = False

    # The plan refuses LMCache's server in containers.
    kv_sockets = ("", "")
    shared_memory = ""
    redis_program = "redis-server"
    prometheus_program = "/bin/prometheus"
    grafana_program = f"{GRAFANA_HOME}/bin/grafana"
    monitoring_dir = MONITORING
    connector_dir = CONNECTOR
    router_dir = ROUTER

    @property
    def image_identity(self) -> str:
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
        # The user has no entry in the image's list of users.
        env = {"TMPDIR": "/tmp", "USER": "pdkit", "LOGNAME": "pdkit"}  # noqa: S108
        env["VLLM_CACHE_ROOT"] = f"{ENGINE_CACHE}/vllm"
        visible = plan.vendor.container.visible
        if visible and engine.gpus:
            own = engine.devices if self.sees_all_gpus else range(len(engine.gpus))
            env[visible] = ",".join(map(str, own))
        return {**env, **_home_env(engine, plan), **self._hub_env(plan)}

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
        return {"HOME": "/tmp"}  # noqa: S108 - the container's own
    home = f"{ENGINE_CACHE}/{engine.name}"
    # Not below the home, if left out, but in the temporary folder, which is memory.
    return {"HOME": home, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor"}


def _on_loopback(port: int) -> Endpoint:
    return Endpoint(LOOPBACK, port, f"{LOOPBACK}:{port}")


def _in_network(name: str, port: int) -> Endpoint:
    return Endpoint(EVERYWHERE, port, f"{name}:{port}")
