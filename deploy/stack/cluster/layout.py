"""Where the parts of a stack are in a Kubernetes cluster, whose pods have other names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from deploy.planning.engines import EnginePlan, Role
from deploy.planning.plan import Plan
from deploy.planning.redis import RedisPlan
from deploy.stack.containers import ContainerLayout
from deploy.stack.layout import ENGINE_CACHE, ENGINE_PORT, EVERYWHERE, Endpoint, FilePlace
from deploy.stack.service import ServiceRole

# Configuration files with their secrets filled in; in memory.
FILLED = "/run/pdkit"
REDIS = "redis"


def workload(role: ServiceRole) -> str:
    """Return the name of the workload, and of the Service, that the pods of a role belong to."""
    return "engine" if role == "aggregated" else role


def is_engine(role: ServiceRole) -> bool:
    """Tell whether services of this role are vLLM engines."""
    return role in get_args(Role)


@dataclass(frozen=True)
class ClusterLayout(ContainerLayout):
    """Pods of one namespace: `producer-0` is the first of the StatefulSet `producer`."""

    def engine(self, engine: EnginePlan) -> Endpoint:
        """Return the address of the engine's own pod."""
        pod = f"{engine.name}.{workload(engine.role)}"
        return Endpoint(EVERYWHERE, ENGINE_PORT, f"{pod}:{ENGINE_PORT}")

    def engine_source(self, role: str) -> str:
        # A headless Service has the addresses of all its pods, and is called as their role is.
        return f"dns://{role}:{ENGINE_PORT}?role={role}"

    def redis(self, shard: RedisPlan) -> Endpoint:
        """Return the address of the shard's own pod."""
        own = super().redis(shard)
        number = shard.name.removeprefix(REDIS).removeprefix("-") or "0"
        return replace(own, reached_at=f"{REDIS}-{number}.{REDIS}:{own.port}")

    def file(self, service: str, name: str) -> FilePlace:
        """Return where a file is kept, and where its pod has it with secrets filled in."""
        return FilePlace(f"{service}/{name}", f"{FILLED}/{name}")

    def engine_env(self, engine: EnginePlan, plan: Plan) -> dict[str, str]:
        """Return the variables of an engine, with its caches in the pod's own folder."""
        env = super().engine_env(engine, plan)
        if not plan.vendor.has_gpus:
            return env
        # Each pod has its own cache: no need for a folder with its engine's name.
        home = f"{ENGINE_CACHE}/home"
        return {**env, "HOME": home, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor"}
