"""Where the parts of a stack lie; `process_layout` and `containers` have the two answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from deploy.assets import Kit
from deploy.planning.engines import EnginePlan
from deploy.planning.lmcache_server import LmcacheServerPlan
from deploy.planning.plan import Plan
from deploy.planning.redis import RedisPlan
from deploy.stack.service import Service

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - of a container's own network, on which only its stack is
WILDCARDS = (EVERYWHERE, "::")  # which a client of this machine reaches on loopback
SECRETS = PurePosixPath("/run/secrets")
ENGINE_KEY = "engine_key"
KV_KEY = "kv_key"
HUB_TOKEN = "hf_token"  # noqa: S105 - the name of the secret, not the secret
REDIS_PASSWORD = "redis_password"  # noqa: S105 - as above
REDIS_URL = "redis_url"
API_KEY = "api_key"
CONNECTOR = "/opt/pdkit/connector"
ROUTER = "/opt/pdkit/router"
ROUTER_CONTROL = "/run/pdkit-router"
DRAINED = "drained"
KV_PAGES = "/run/pdkit-kv"
MONITORING = "/opt/pdkit/monitoring"
MONITORING_DATA = "/data"
# Where Grafana's image, and its packages for Debian and Red Hat, put what it serves.
GRAFANA_HOME = "/usr/share/grafana"
MODELS = PurePosixPath("/models")
HUB_CACHE = "/hub"
ENGINE_CACHE = "/cache"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where POSIX shared memory is

ENGINE_PORT = 8000


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
        """Where the service sees it."""
        return self.target or self.path


class Layout(Protocol):
    """What differs between processes and containers while services are put together."""

    @property
    def kit(self) -> Kit:
        """What services are given of pdkit itself."""

    @property
    def redis_program(self) -> str:
        """The command that starts Redis."""

    @property
    def engine_program(self) -> str:
        """The Python that runs engines."""

    @property
    def router_program(self) -> str:
        """The Python that runs the router."""

    @property
    def connector_dir(self) -> str:
        """Where engines see the connector's code."""

    @property
    def router_dir(self) -> str:
        """Where the router sees its code."""

    @property
    def prometheus_program(self) -> str:
        """The command that starts Prometheus."""

    @property
    def grafana_program(self) -> str:
        """Grafana's server; "" if there is none."""

    @property
    def monitoring_dir(self) -> str:
        """Where services see the folder of rules and dashboards."""

    @property
    def software_identity(self) -> str:
        """What tells one software of engines from another: image, or versions for processes."""

    @property
    def versions(self) -> tuple[str | None, str | None]:
        """The versions of vLLM and LMCache that engines will run, as far as they were seen."""

    def redis(self, shard: RedisPlan) -> Endpoint:
        """Return where a Redis server listens."""

    def redis_socket(self, shard: RedisPlan) -> str:
        """Return the Unix socket by which engines reach Redis; "" if they share no folder."""

    @property
    def kv_requests(self) -> str:
        """The Unix socket of LMCache's server for the requests of engines."""

    @property
    def kv_pages(self) -> FilePlace:
        """The Unix socket of its pages, which this machine reads."""

    @property
    def temp_env(self) -> dict[str, str]:
        """Variables by which programs find a folder for temporary files, and their user's name."""

    def kv_server_env(self, plan: Plan) -> dict[str, str]:
        """Return the variables of LMCache's server that differ between processes and containers."""

    def kv_metrics(self, server: LmcacheServerPlan) -> Endpoint:
        """Return where LMCache's server shows Prometheus its metrics."""

    @property
    def shared_memory(self) -> str:
        """Return the prefix of the names of the stack's shared memory."""

    def engine(self, engine: EnginePlan) -> Endpoint:
        """Return where an engine listens."""

    def engine_source(self, role: str) -> str:
        """Return the URL by which the router finds a role's engines; "" if it is told each."""

    def router(self, plan: Plan) -> Endpoint:
        """Return where the router listens for clients."""

    def router_metrics(self, plan: Plan) -> Endpoint:
        """Return where the router shows its metrics."""

    def prometheus(self, plan: Plan) -> Endpoint:
        """Return where Prometheus listens."""

    def grafana(self, plan: Plan) -> Endpoint:
        """Return where Grafana listens."""

    @property
    def drain_file(self) -> FilePlace:
        """The file with the engines that the router leaves alone."""

    def secret(self, name: str) -> str:
        """Return where a service sees the file of a secret."""

    def file(self, service: str, name: str) -> FilePlace:
        """Return where a configuration file of a service lies."""

    def data_dir(self, service: str) -> str:
        """Return where a monitoring service keeps what it records."""

    def redis_dir(self, shard: RedisPlan) -> str:
        """Return the folder in which a Redis server works."""

    def model_ref(self, plan: Plan) -> str:
        """Return the model as an argument of engines: a folder, or an id of the hub."""

    def engine_env(self, engine: EnginePlan, plan: Plan) -> dict[str, str]:
        """Return the variables of an engine that differ between processes and containers."""

    def placed(self, service: Service, plan: Plan) -> Service:
        """Return a service with its container's settings; unchanged, if it is a process."""
