"""A stack of processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.assets import Kit
from deploy.planning.address import host_port
from deploy.planning.engines import EnginePlan
from deploy.planning.lmcache_server import LmcacheServerPlan
from deploy.planning.plan import Plan
from deploy.planning.redis import RedisPlan
from deploy.stack.layout import DRAINED, LOOPBACK, WILDCARDS, Endpoint, FilePlace
from deploy.stack.service import Service

# Where a plan is only shown: engines may not be installed yet.
UNKNOWN_VERSION = "unknown until engines are here"


@dataclass(frozen=True)
class ProcessLayout:
    """Processes of this machine, on its loopback address unless the user names another.

    Attributes:
        run_dir: holds one folder a service, for its configuration files.
        secrets_dir: holds one file a secret.
        temp_dir: the engines' own, sockets among it; a short path, since those are limited.
        engine_program, router_program: the interpreter that has vLLM, LMCache and the router.
        hub_cache, hub_token: a folder for models of the hub, and a file with a token, where the
            user names them.
        versions: of vLLM and LMCache in the engines' Python, as far as they are known.
    """

    run_dir: Path
    secrets_dir: Path
    temp_dir: Path
    engine_program: str
    router_program: str
    redis_program: str
    kit: Kit
    hub_cache: Path | None = None
    hub_token: Path | None = None
    prometheus_program: str = ""
    grafana_program: str = ""
    versions: tuple[str | None, str | None] = (None, None)

    @property
    def software_identity(self) -> str:
        vllm, lmcache = (version or UNKNOWN_VERSION for version in self.versions)
        return f"vLLM {vllm}, LMCache {lmcache}"

    @property
    def monitoring_dir(self) -> str:
        return str(self.kit.monitoring)

    @property
    def connector_dir(self) -> str:
        return str(self.kit.connector)

    @property
    def router_dir(self) -> str:
        return str(self.kit.router)

    def redis(self, shard: RedisPlan) -> Endpoint:
        return _on_loopback(shard.port)

    def redis_socket(self, shard: RedisPlan) -> str:
        return str(self.temp_dir / f"{shard.name}.sock")

    @property
    def kv_requests(self) -> str:
        return str(self.temp_dir / "kv.sock")

    @property
    def kv_pages(self) -> FilePlace:
        return FilePlace(str(self.temp_dir / "kv-pages.sock"), "")

    @property
    def temp_env(self) -> dict[str, str]:
        return {"TMPDIR": str(self.temp_dir)}

    def kv_server_env(self, plan: Plan) -> dict[str, str]:
        return {**self.temp_env, **_gpus_env(plan, [gpu.index for gpu in plan.gpus])}

    def kv_metrics(self, server: LmcacheServerPlan) -> Endpoint:
        return _on_loopback(server.metrics_port)

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
        hub = {"HF_HUB_CACHE": self.hub_cache, "HF_TOKEN_PATH": self.hub_token}
        named = {name: str(path) for name, path in hub.items() if path}
        return {**self.temp_env, **named, **_gpus_env(plan, engine.devices)}

    def placed(self, service: Service, plan: Plan) -> Service:  # noqa: ARG002 - as it is
        return service


def _gpus_env(plan: Plan, devices: Sequence[int]) -> dict[str, str]:
    """Return the variables that give a process its GPUs and no others."""
    visible = plan.vendor.visible_devices
    given = {visible: ",".join(map(str, devices))} if visible else {}
    return {**plan.vendor.process_env, **given}


def _on_loopback(port: int) -> Endpoint:
    return Endpoint(LOOPBACK, port, f"{LOOPBACK}:{port}")
