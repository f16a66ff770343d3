"""The machine and the stack of a proof: started by the kit's own command, and asked over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
import yaml

from bench.gpu_proof.model import Shape, folder_of
from bench.gpu_proof.results import ROOT
from deploy.config.fields import IN_ENGINES, Connector
from deploy.metrics.engine import CacheCounters
from deploy.runtime.engine_api import EngineApi, bearer
from deploy.runtime.home import Home, StackHome
from deploy.runtime.secrets import Secret, read_secrets
from deploy.stack.layout import ENGINE_KEY
from deploy.stack.service import ServiceRole
from deploy.verify.equivalence import Completion
from deploy.verify.store_path import StorePath
from deploy.workflows.check.probes import drop_from_memory
from deploy.workflows.running import require_stack

STACK = "gpu-proof"
_INTERRUPT_S = 60
_ASK_S = 300


class StepFailed(Exception):
    """A step cannot go on; the text says why."""


@dataclass(frozen=True)
class Setup:
    """What a stack is to be, beside its model: one producer, one consumer.

    Attributes:
        gpus: 1 is shared by both.
        connector: how they share KV.
        env, args: for the engines.
    """

    gpus: int = 1
    connector: Connector = IN_ENGINES
    layerwise: bool = False
    save_decode_cache: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Session:
    """One run of the proof.

    Attributes:
        state: the folder that holds all of it.
        shape: of the model.
        small: short prompts, for machines without a GPU.
    """

    state: Path
    vendor: str
    port: int
    gpus: int
    shape: Shape
    small: bool

    @property
    def home(self) -> Home:
        return Home(self.state / "home", self.state / "home" / "cache")

    @property
    def files(self) -> StackHome:
        return self.home.stack(STACK)

    @property
    def models(self) -> Path:
        return self.state / "models"

    def model(self) -> Path:
        """Return the model of the step `model`."""
        folder = folder_of(self.models, self.shape)
        if not (folder / "config.json").is_file():
            raise StepFailed("there is no model yet; try: --only model")
        return folder

    def stack(self, setup: Setup = Setup(), *, check: bool = False) -> Stack:
        """Return the stack, started or restarted where it is not up like this.

        Raises:
            StepFailed: `deploy up` failed.
        """
        wanted = json.dumps(asdict(setup), sort_keys=True)
        stamp = self.state / "setup.json"
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
            self.down()
            stamp.write_text(wanted, encoding="utf-8")
        file = self.spec_file(setup)
        self.deploy("up", "-f", str(file), *(() if check else ("--no-check",)))
        return Stack(self, setup, self.model().name)

    def spec_file(self, setup: Setup = Setup()) -> Path:
        """Write the deploy.yaml of a stack."""
        file = self.state / "deploy.yaml"
        file.write_text(yaml.safe_dump(self._spec(setup)), encoding="utf-8")
        return file

    def _spec(self, setup: Setup) -> dict[str, Any]:
        return {
            "name": STACK,
            "vendor": self.vendor,
            "runtime": "process",
            "port": self.port,
            "gpus": setup.gpus,
            "connector": setup.connector,
            "model": str(self.model()),
            "layerwise": setup.layerwise,
            "save_decode_cache": setup.save_decode_cache,
            "engine": {
                "python": sys.executable,
                # The development mode has /reset_prefix_cache.
                "env": {"VLLM_SERVER_DEV_MODE": "1", **setup.env},
                "args": list(setup.args),
            },
        }

    def down(self) -> None:
        """Stop the stack, whatever it is."""
        self.deploy("down", "--name", STACK)
        (self.state / "setup.json").unlink(missing_ok=True)

    def keep_logs(self, step: str) -> None:
        """Copy what the services have said so far, to find the reason later."""
        if self.files.logs_dir.is_dir():
            shutil.copytree(self.files.logs_dir, self.state / "logs" / step, dirs_exist_ok=True)

    def deploy(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> Any:
        """Run a command of the kit; return its data.

        Raises:
            StepFailed: it ended with another exit code.
        """
        process = subprocess.Popen(
            (sys.executable, "-m", "deploy", *arguments, "--json"),
            cwd=ROOT,
            env={
                **os.environ,
                "PDKIT_HOME": str(self.home.state),
                "PDKIT_SUPERVISE": "false",  # it kills services and looks at what is left
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            stdout, _ = process.communicate()
        except BaseException:  # Ctrl-C, or the step's time is up: let the command undo its work
            process.send_signal(signal.SIGINT)
            process.wait(_INTERRUPT_S)
            raise
        if process.returncode not in codes:
            raise StepFailed(f"deploy {arguments[0]}: exit {process.returncode}: {_errors(stdout)}")
        return json.loads(stdout)["data"]


def _errors(stdout: str) -> str:
    try:
        errors = json.loads(stdout)["errors"]
    except (ValueError, KeyError):
        return "no JSON on stdout"
    return "; ".join(str(error["message"]) for error in errors)


@dataclass(frozen=True)
class Stack:
    """The running stack."""

    session: Session
    setup: Setup
    model: str

    def ask(self, whom: str, prompt: list[int], max_tokens: int = 16) -> Completion:
        with self._api(whom) as api:
            return api.complete(self.model, prompt, max_tokens=max_tokens)

    def timed(self, whom: str, prompt: list[int]) -> float:
        """Return the seconds to the first token."""
        began = time.perf_counter()
        self.ask(whom, prompt, 1)
        return time.perf_counter() - began

    def counters(self, whom: str) -> CacheCounters:
        with self._api(whom) as api:
            return api.cache_counters()

    def store_path(self, whom: str) -> StorePath:
        with self._api(whom) as api:
            return api.store_path() or StorePath()

    def forget(self) -> None:
        """Empty both engines' own prefix caches."""
        for whom in ("producer-0", "consumer-0"):
            url = f"{self._url(whom)}/reset_prefix_cache"
            answer = httpx.post(url, headers=bearer(self._key()), trust_env=False, timeout=60)
            answer.raise_for_status()

    def stores(self) -> list[redis.Redis]:
        """Return a client of each shard of the store."""
        file = self.session.files.secrets_dir / "redis_password"
        password = file.read_text(encoding="utf-8").strip()
        shards = require_stack(self.session.home, STACK).stack.redis
        return [redis.Redis(unix_socket_path=one.socket, password=password) for one in shards]

    def kill(self, role: ServiceRole) -> None:
        """Kill every service of a role."""
        running = require_stack(self.session.home, STACK)
        for service in running.stack.services:
            if service.role == role:
                os.kill(running.state.services[service.name].pid, signal.SIGKILL)

    def drop_from_memory(self, prompt: list[int]) -> None:
        """Have LMCache's server drop a prompt's KV from its memory once Redis has it.

        Raises:
            StepFailed: Redis does not get it in time.
        """
        if not drop_from_memory(require_stack(self.session.home, STACK), prompt):
            raise StepFailed("Redis does not get a prompt's KV in time")

    def says(self, text: str) -> bool:
        """Tell whether the log of every engine has a text."""
        logs = sorted(self.session.files.logs_dir.glob("*r-0.log"))
        return bool(logs) and all(text in log.read_text(errors="replace") for log in logs)

    def _api(self, whom: str) -> EngineApi:
        return EngineApi(self._url(whom), timeout_s=_ASK_S, api_key=self._key())

    def _key(self) -> Secret:
        return read_secrets(self.session.files.secrets_dir, (ENGINE_KEY,))[ENGINE_KEY]

    def _url(self, whom: str) -> str:
        offset = {"producer-0": 10, "consumer-0": 11}[whom]
        return f"http://127.0.0.1:{self.session.port + offset}"
