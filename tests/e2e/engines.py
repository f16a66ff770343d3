"""What tests do to the engines of a running stack that no command of the kit does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from http.client import HTTPConnection

import httpx
import psutil
import redis
import yaml

from deploy.runtime.engine_api import ApiError, EngineApi, bearer, greedy
from deploy.runtime.home import Home
from deploy.runtime.process.launcher import Launched
from deploy.runtime.process.sessions import has_ended
from deploy.runtime.readiness import wait_ready
from deploy.stack.service import Service
from deploy.verify.equivalence import Completion, compare
from deploy.verify.store_path import StorePath
from deploy.workflows.running import require_stack
from deploy.workflows.saved_state import write_state
from tests.e2e.conftest import Deploy, eventually
from tests.e2e.traffic import MODEL

OFFSETS = {"front": 0, "producer-0": 10, "consumer-0": 11}
CHUNK = 256

# vLLM's /reset_prefix_cache.
VLLM_DEV_API = {"VLLM_SERVER_DEV_MODE": "1"}


Change = Callable[[Service], Service]


def in_environ(environ: Mapping[str, str]) -> Change:
    """Return what puts variables into a service's environment."""
    return lambda service: replace(service, env={**service.env, **environ})


def without_environ(name: str) -> Change:
    """Return what takes a variable out of a service's environment."""
    return lambda service: replace(
        service, env={key: value for key, value in service.env.items() if key != name}
    )


def with_arguments(*more: str) -> Change:
    """Return what appends arguments, of which vLLM takes the last of a name."""
    return lambda service: replace(service, argv=(*service.argv, *more))


def without_argument(name: str) -> Change:
    """Return what takes an argument and its value away."""

    def change(service: Service) -> Service:
        at = service.argv.index(name)
        return replace(service, argv=(*service.argv[:at], *service.argv[at + 2 :]))

    return change


def all_of(*changes: Change) -> Change:
    """Return what changes a service in several ways."""
    return lambda service: reduce(lambda changed, change: change(changed), changes, service)


def with_settings(**settings: str) -> Change:
    """Return what changes the connector's own settings in LMCache's file."""

    def change(service: Service) -> Service:
        (file,) = service.files
        config = yaml.safe_load(file.text)
        config["extra_config"].update({f"pdkit.{name}": v for name, v in settings.items()})
        return replace(service, files=(replace(file, text=yaml.safe_dump(config)),))

    return change


@dataclass(frozen=True)
class Engines:
    """The engines of one stack, 1p1d, that serves the tiny model: a character is a token."""

    kit: Deploy
    name: str
    port: int

    def url(self, whom: str) -> str:
        return f"http://127.0.0.1:{self.port + OFFSETS[whom]}"

    def api(self, whom: str, *, timeout_s: float = 120) -> EngineApi:
        key = self.kit.engine_key(self.name)
        return EngineApi(self.url(whom), timeout_s=timeout_s, api_key=key)

    def ask(
        self, whom: str, prompt: str, max_tokens: int = 16, *, within_s: float = 120
    ) -> Completion:
        """Complete a prompt greedily; raise ApiError where there is no right answer in time."""
        with self.api(whom, timeout_s=within_s) as api:
            return api.complete(MODEL, list(prompt.encode()), max_tokens=max_tokens)

    def begin(self, whom: str, prompt: str) -> HTTPConnection:
        """Ask for an answer; who closes the connection leaves."""
        connection = HTTPConnection("127.0.0.1", self.port + OFFSETS[whom])
        body = json.dumps(greedy(MODEL, list(prompt.encode()), 16))
        headers = {"content-type": "application/json", **self._headers()}
        connection.request("POST", "/v1/completions", body, headers)
        return connection

    def ask_together(
        self, whom: str, prompts: Sequence[str], max_tokens: int, *, within_s: float
    ) -> list[Completion]:
        """Complete prompts of one request, which an engine therefore begins in the same steps.

        Raises:
            httpx.HTTPError: no answer in time, or not 200.
        """
        body = greedy(MODEL, [list(prompt.encode()) for prompt in prompts], max_tokens)
        url, headers = f"{self.url(whom)}/v1/completions", self._headers()
        with httpx.Client(timeout=within_s, trust_env=False) as client:
            answer = client.post(url, json=body, headers=headers).raise_for_status().json()
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        assert len(choices) == len(prompts)
        return [
            Completion(tuple(found["tokens"]), tuple(found["top_logprobs"]), len(prompt), 0)
            for found, prompt in zip((one["logprobs"] for one in choices), prompts, strict=True)
        ]

    def ask_counting(self, whom: str, prompt: str) -> tuple[Completion, int]:
        """Return the answer, and the tokens that the engine loaded for it."""
        before = self.metric(whom, "vllm:external_prefix_cache_hits_total")
        answer = self.ask(whom, prompt)
        return answer, self.metric(whom, "vllm:external_prefix_cache_hits_total") - before

    def recomputed(self, prompt: str, max_tokens: int = 16) -> Completion:
        """Return the producer's answer to a prompt of which it has nothing; empties the store."""
        self.store().flushall()
        self.forget()
        answer = self.ask("producer-0", prompt, max_tokens)
        self.store().flushall()
        self.forget()
        return answer

    def forget(self) -> None:
        """Empty the engines' own prefix caches."""
        for whom in ("producer-0", "consumer-0"):
            url, headers = f"{self.url(whom)}/reset_prefix_cache", self._headers()
            httpx.post(url, headers=headers, trust_env=False, timeout=60).raise_for_status()

    def metric(self, whom: str, name: str) -> int:
        return int(self._metric(whom, name))

    def waiting(self, whom: str) -> int:
        """Return how many clients wait for their first token."""
        return self.metric(whom, "vllm:num_requests_waiting")

    def usage(self, whom: str) -> float:
        """Return which part of an engine's KV memory requests hold."""
        return self._metric(whom, "vllm:kv_cache_usage_perc")

    def _metric(self, whom: str, name: str) -> float:
        url, headers = f"{self.url(whom)}/metrics", self._headers()
        text = httpx.get(url, headers=headers, trust_env=False, timeout=60).text
        values = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        assert values, f"{whom} has no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in values)

    def _headers(self) -> dict[str, str]:
        return bearer(self.kit.engine_key(self.name))

    def store(self) -> redis.Redis:
        return self.kit.redis(self.name)

    def keys_by_chunk(self, prompt: str) -> list[list[bytes]]:
        """Store a prompt chunk by chunk; return the keys of each."""
        store, known, found = self.store(), set[bytes](), list[list[bytes]]()
        store.flushall()
        for end in range(CHUNK, len(prompt) + 1, CHUNK):
            self.ask("producer-0", prompt[:end] + "?", 1)
            # The answer waited until they were stored.
            new = set(store.keys()) - known
            assert new, f"chunk {len(found)} was not stored"
            known.update(new)
            found.append(sorted(new))
        return found

    def pids(self) -> dict[str, int]:
        return {whom: self.kit.pid(self.name, whom) for whom in ("producer-0", "consumer-0")}

    def is_alive(self, whom: str) -> bool:
        """Tell whether an engine answers a prompt that it has never seen."""
        with suppress(ApiError):
            return bool(self.ask(whom, f"alive at {time.monotonic()}?", 1).tokens)
        return False

    def dies(self, whom: str) -> bool:
        """Tell whether an engine's process ends."""
        process = psutil.Process(self.kit.pid(self.name, whom))
        return eventually(lambda: not process.is_running() or has_ended(process))

    def restart(self, environs: Mapping[str, Mapping[str, str]]) -> None:
        """End services and start them together, each with more in its environment."""
        self.start_otherwise({whom: in_environ(environ) for whom, environ in environs.items()})

    def start_otherwise(self, changes: Mapping[str, Change]) -> None:
        """End services and start them together, each as a change of what the kit would start."""
        running = require_stack(Home(self.kit.home, self.kit.home / "cache"), self.name)
        launcher, state = running.launcher, running.state
        launcher.stop({whom: state.services[whom] for whom in changes}, grace_s=10)
        started: dict[str, tuple[Service, Launched]] = {}
        for whom, change in changes.items():
            changed = change(running.stack.service(whom))
            starts = state.services[whom].starts + 1
            launched = launcher.start(changed, running.secrets, starts=starts)
            started[whom] = (changed, launched)
            state = state.with_service(launched.record)
        write_state(Home(self.kit.home, self.kit.home).stack(self.name).state_file, state)
        wait_ready(started, running.is_ready, lambda _: None, launcher, only=set(changes))


def assert_same(reference: Completion, answer: Completion) -> None:
    """Fail where two answers differ by more than rounding."""
    found = compare(reference, answer)
    assert found.matches, found


def path(engines: Engines, whom: str) -> StorePath:
    """Return what an engine counts of its way to Redis."""
    with engines.api(whom) as api:
        found = api.store_path()
    assert found is not None
    return found
