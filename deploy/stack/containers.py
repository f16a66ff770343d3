"""A stack in the containers of one Compose project: images, mounts, networks, rights and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.assets import Kit, asset
from deploy.config.vendors import Vendor
from deploy.planning.engines import EnginePlan
from deploy.planning.inventory import Gpu
from deploy.planning.lmcache_server import LmcacheServerPlan
from deploy.planning.plan import Plan
from deploy.planning.redis import RedisPlan
from deploy.stack.layout import (
    CONNECTOR,
    DRAINED,
    ENGINE_CACHE,
    ENGINE_KEY,
    ENGINE_PORT,
    EVERYWHERE,
    GRAFANA_HOME,
    HUB_CACHE,
    HUB_TOKEN,
    KV_KEY,
    KV_PAGES,
    LOOPBACK,
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
from deploy.stack.service import Container, DeviceAccess, Mount, Published, Service, Stack

# 'uid:gid' in containers where Docker runs without root: there it is the user.
ROOTLESS = "0:0"
STORE_NETWORK = "store"
FRONT_NETWORK = "front"
_ALL_RENDER_NODES = "/dev/dri"
_ROUTER_LIMIT_MIB = 2048
_PROMETHEUS_LIMIT_MIB = 2048
_GRAFANA_LIMIT_MIB = 1024
# Fragmentation, and the buffers of clients that read values of megabytes.
_REDIS_OVERHEAD_MIB = 512
_SHM_MIB_A_RANK = 1024
_UNKNOWN_WEIGHTS_MIB = 65536
# In which LMCache's server reaches the engines' KV.
_SHARED_MEMORY = Mount("", SHARED_MEMORY, read_only=False)
# Past any proxy that Docker's settings put into every container.
_HEALTH_PROGRAM = (
    "import urllib.request as u; u.build_opener(u.ProxyHandler({{}}))"
    ".open('http://127.0.0.1:{port}{path}', timeout=2).read(1)"
)
_SOCKET_HEALTH_PROGRAM = (
    "import http.client as h, socket as s, sys; c = h.HTTPConnection('localhost'); "
    "c.sock = s.socket(s.AF_UNIX); c.sock.settimeout(2); c.sock.connect('{socket}'); "
    "c.request('GET', '{path}'); sys.exit(c.getresponse().status != 200)"
)
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
    versions = (None, None)  # the image's content includes them

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

    def kv_metrics(self, server: LmcacheServerPlan) -> Endpoint:
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


def in_container(service: Service, plan: Plan, layout: ContainerLayout) -> Service:
    """Return the service with what it gets as a container of the stack."""
    if service.role == "redis":
        # No port of this machine: nothing but the engines can reach it.
        return replace(service, host="", port=0, container=_redis(service, layout))
    if service.role == "kv-server":
        return replace(service, container=_kv_server(service, plan, layout))
    if service.role == "router":
        return replace(service, container=_router(service, plan, layout))
    if service.role == "prometheus":
        return replace(service, container=_prometheus(service, plan, layout))
    if service.role == "grafana":
        return replace(service, container=_grafana(service, plan, layout))
    (engine,) = (engine for engine in plan.engines if engine.name == service.name)
    return replace(service, container=_engine(service, engine, plan, layout))


def _redis(service: Service, layout: ContainerLayout) -> Container:
    # The password goes from its file to the command's input: arguments and environments are seen.
    log_in = f"printf 'AUTH '; cat {SECRETS}/redis_password"
    ping = f"{{ {log_in}; echo PING; }} | redis-cli | grep -q PONG"
    return Container(
        image=layout.images.redis,
        user=layout.user,
        networks=(STORE_NETWORK,),
        health_argv=("sh", "-c", ping),
        limit_mib=service.memory_mib * 5 // 4 + _REDIS_OVERHEAD_MIB,
        secrets=("redis_password",),
    )


def _kv_server(service: Service, plan: Plan, layout: ContainerLayout) -> Container:
    pages = layout.kv_pages
    page = _SOCKET_HEALTH_PROGRAM.format(socket=pages.target, path=service.health.path)
    return Container(
        image=layout.images.engine_id or layout.images.engine,
        user=layout.user,
        # A Redis of the user's own is not on the stack's inner network, and neither is Prometheus.
        networks=(
            *((STORE_NETWORK,) if plan.redis else ()),
            *((FRONT_NETWORK,) if plan.prometheus_port or not plan.redis else ()),
        ),
        health_argv=(layout.engine_program, "-c", page),
        limit_mib=service.memory_mib * 3 // 2,
        mounts=(
            Mount(str(layout.kit.connector), CONNECTOR),
            Mount(str(Path(pages.path).parent), KV_PAGES, read_only=False),
            *_tls_files(plan),
            _SHARED_MEMORY,
        ),
        secrets=_kv_secrets(plan),
        # Those of all engines: it reads and writes their KV where it is.
        devices=device_access(plan.gpus, plan),
        shm_mib=_shm_mib(plan),
        big_locks=_big_locks(plan, layout),
    )


def _big_locks(plan: Plan, layout: ContainerLayout) -> bool:
    """Tell whether a container with GPUs may lock memory; Docker without root cannot raise this."""
    return plan.vendor.has_gpus and layout.user != ROOTLESS


def _shm_mib(plan: Plan) -> int:
    """Return the size of an engine's /dev/shm; of all engines' where it is one memory."""
    own = _SHM_MIB_A_RANK * (1 + plan.tp)
    return plan.shared_memory_peak_mib + own * len(plan.engines) if plan.kv_server else own


def _router(service: Service, plan: Plan, layout: ContainerLayout) -> Container:
    front, metrics = layout.router(plan), layout.router_metrics(plan)
    return Container(
        image=layout.images.router,
        user=layout.user,
        networks=(FRONT_NETWORK,),
        health_argv=_health(layout.router_program, front.port, service.health.path),
        limit_mib=_ROUTER_LIMIT_MIB,
        mounts=(
            Mount(str(layout.kit.router), ROUTER),
            # The folder: a file that is replaced would stay the old one in there.
            Mount(str(Path(layout.drain_file.path).parent), ROUTER_CONTROL),
        ),
        published=(
            Published(plan.bind, plan.port, front.port),
            Published(LOOPBACK, plan.router_metrics_port, metrics.port),
        ),
        secrets=(ENGINE_KEY, *(("api_key",) if plan.keyed else ())),
    )


def _prometheus(service: Service, plan: Plan, layout: ContainerLayout) -> Container:
    place = layout.prometheus(plan)
    url = f"--url=http://{LOOPBACK}:{place.port}"
    return Container(
        image=layout.images.prometheus,
        user=layout.user,
        networks=(FRONT_NETWORK,),
        health_argv=("/bin/promtool", "check", "ready", url),
        limit_mib=_PROMETHEUS_LIMIT_MIB,
        mounts=_monitoring_mounts(service, layout),
        published=(Published(LOOPBACK, plan.prometheus_port, place.port),),
        secrets=(ENGINE_KEY,),
    )


def _grafana(service: Service, plan: Plan, layout: ContainerLayout) -> Container:
    place = layout.grafana(plan)
    url = f"http://{LOOPBACK}:{place.port}{service.health.path}"
    return Container(
        image=layout.images.grafana,
        user=layout.user,
        networks=(FRONT_NETWORK,),
        health_argv=("wget", "-q", "-Y", "off", "-O", "-", url),
        limit_mib=_GRAFANA_LIMIT_MIB,
        mounts=_monitoring_mounts(service, layout),
        published=(Published(LOOPBACK, plan.grafana_port, place.port),),
    )


def _monitoring_mounts(service: Service, layout: ContainerLayout) -> tuple[Mount, ...]:
    data = layout.run_dir / service.name / "data"
    return (
        Mount(str(layout.kit.monitoring), MONITORING),
        Mount(str(data), MONITORING_DATA, read_only=False),
    )


def _engine(service: Service, engine: EnginePlan, plan: Plan, layout: ContainerLayout) -> Container:
    port = layout.engine(engine).port
    mounts = [
        Mount(str(layout.kit.connector), CONNECTOR),
        Mount(str(layout.engine_cache), ENGINE_CACHE, read_only=False),
    ]
    if plan.model.source == "hub":
        if layout.hub_cache:
            mounts.append(Mount(str(layout.hub_cache), HUB_CACHE, read_only=False))
    else:
        mounts.append(Mount(plan.model.ref, layout.model_ref(plan)))
    mounts += [_SHARED_MEMORY] if plan.kv_server else _tls_files(plan)
    return Container(
        # The image's id if it is known. A tag may point to another image at the next start, and KV
        # of that image may have another layout.
        image=layout.images.engine_id or layout.images.engine,
        user=layout.user,
        networks=(*((STORE_NETWORK,) if plan.redis and plan.uses_redis else ()), FRONT_NETWORK),
        health_argv=_health(layout.engine_program, port, service.health.path),
        limit_mib=_engine_limit_mib(engine, plan),
        mounts=tuple(mounts),
        published=(Published(LOOPBACK, engine.port, port),),
        secrets=(
            ENGINE_KEY,
            *(_kv_secrets(plan) if plan.uses_redis else ()),
            *((HUB_TOKEN,) if layout.hub_token and plan.model.source == "hub" else ()),
        ),
        devices=device_access(engine.gpus, plan),
        shm_mib=_shm_mib(plan),
        big_locks=_big_locks(plan, layout),
    )


def _tls_files(plan: Plan) -> list[Mount]:
    # The URL names them as this machine does.
    return [Mount(str(file), str(file)) for file in plan.spec.redis.tls_files]


def engine_secrets(plan: Plan) -> tuple[str, ...]:
    """Return the secrets that engines and what stores their KV share, made for the stack."""
    return (ENGINE_KEY, *_kv_secrets(plan))


def _kv_secrets(plan: Plan) -> tuple[str, ...]:
    signed = plan.shares_kv and plan.spec.redis.integrity == "mac"
    return (KV_KEY,) if signed else ()


def _health(interpreter: str, port: int, path: str) -> tuple[str, ...]:
    return (interpreter, "-c", _HEALTH_PROGRAM.format(port=port, path=path))


def _engine_limit_mib(engine: EnginePlan, plan: Plan) -> int:
    """Return the memory beyond which an engine has gone wrong, rather than what it needs."""
    if plan.spec.engine.memory_gib:
        return round(plan.spec.engine.memory_gib * 1024)
    shm_mib = _SHM_MIB_A_RANK * (1 + plan.tp)
    if not plan.vendor.has_gpus:
        return engine.memory_mib * 3 // 2 + shm_mib
    # Weights pass through host memory on their way to the GPU.
    weights = plan.model.weight_bytes
    weights_mib = weights // 2**20 if weights is not None else _UNKNOWN_WEIGHTS_MIB
    return 2 * engine.memory_mib + 2 * weights_mib + shm_mib


def uses_cdi(plan: Plan) -> bool:
    """Tell whether GPUs are given by the Container Device Interface rather than by a runtime."""
    if plan.spec.gpu_access != "auto":
        return plan.spec.gpu_access == "cdi"
    access = plan.vendor.container
    # Vendors without a container runtime get device nodes. The others need CDI only if Docker lacks
    # their runtime.
    return (
        bool(access.driver)
        and access.driver not in plan.container_gpus
        and (access.cdi_kind in plan.container_gpus)
    )


def call_filter(name: str) -> Path:
    """Return the file of a system call filter that the kit brings."""
    return asset("compose", name)


def call_filters(stack: Stack) -> dict[str, str]:
    """Return name → text of the filters that a stack's containers need."""
    names = {one.container.devices.seccomp for one in stack.services if one.container} - {""}
    return {name: call_filter(name).read_text(encoding="utf-8") for name in sorted(names)}


def device_access(gpus: tuple[Gpu, ...], plan: Plan) -> DeviceAccess:
    """Return the settings that give a container its GPUs; none without GPUs."""
    if not gpus:
        return DeviceAccess()
    vendor: Vendor = plan.vendor
    access = vendor.container
    rights = DeviceAccess(seccomp=access.seccomp)
    if uses_cdi(plan):
        # As a reservation: as plain devices, Compose before 2.30 takes their names for paths.
        ids = tuple(f"{access.cdi_kind}={gpu.index}" for gpu in gpus)
        return replace(rights, driver="cdi", ids=ids, groups=plan.gpu_groups)
    if access.driver:
        return replace(rights, driver=access.driver, ids=tuple(str(gpu.index) for gpu in gpus))
    own = tuple(gpu.render_node for gpu in gpus)
    nodes = (_ALL_RENDER_NODES,) if plan.spec.gpu_access == "all" else own
    return replace(rights, names=(*access.nodes, *nodes), groups=plan.gpu_groups)
