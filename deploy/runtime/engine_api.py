"""An engine or router over HTTP: health, models, completions, tokenisation, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deploy.metrics.engine import FINISHED, CacheCounters
from deploy.metrics.page import MetricsPage, parsed_page
from deploy.runtime.logs import plain
from deploy.runtime.secrets import Secret
from deploy.runtime.whole_page import whole_page
from deploy.verify.equivalence import Completion
from deploy.verify.store_path import StorePath

if TYPE_CHECKING:  # imported for requests only
    from deploy.runtime.http_client import Page

_OK = 200
REFUSED = (401, 403)

__all__ = ["ApiError", "CacheCounters", "EngineApi", "TimedOut", "bearer", "greedy"]


class ApiError(Exception):
    """A request that was not answered as asked; `status` is 0 if there was no answer at all.

    The message may quote the answer, with control characters removed.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(plain(message))
        self.status = status


class TimedOut(ApiError):
    """No answer came in time; another attempt may take as long."""


def bearer(key: Secret | None) -> dict[str, str]:
    """Return the Authorization header for a key; {} without a key."""
    return {"Authorization": f"Bearer {key.reveal()}"} if key else {}


def greedy(model: str, prompt: list[int] | list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Return a completion request for one or more prompts of token ids: greedy and comparable."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 5,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }


class EngineApi:
    """A client for one base URL. The environment's proxy settings are not used."""

    def __init__(
        self, base_url: str, *, timeout_s: float = 120.0, api_key: Secret | None = None
    ) -> None:
        self._url = base_url
        self._timeout_s = timeout_s
        self._headers = bearer(api_key)

    def __enter__(self) -> EngineApi:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each request has a connection of its own."""

    def is_healthy(self, path: str = "/health") -> bool:
        """Tell whether a GET of this path answers 200 in time."""
        return self.status(path) == _OK

    def status(self, path: str) -> int:
        """Return the status of the answer to a GET of this path; 0 without one in time."""
        try:
            return self._answer("GET", path).status
        except ApiError:
            return 0

    def tokenize(self, model: str, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text; with special tokens added as a completion has them."""
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        answer = self._post("/tokenize", body)
        with _understanding("/tokenize"):
            return [int(token) for token in answer["tokens"]]

    def max_model_len(self) -> int:
        """Return the longest prompt and answer together, in tokens."""
        answer = self._json("GET", "/v1/models")
        with _understanding("/v1/models"):
            return int(answer["data"][0]["max_model_len"])

    def version(self) -> str:
        """Return the engine's release of vLLM; "" if unknown."""
        try:
            return str(self._json("GET", "/version")["version"])
        except (ApiError, KeyError, TypeError):
            return ""

    def complete(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        tag: str = "",
        salt: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """Complete token ids greedily, with the five likeliest tokens at each step.

        Args:
            tag: becomes a part of the keys of the prompt's KV, by LMCache; the router drops it.
            salt: keeps the prompt's KV from requests with another, by vLLM.
            timeout_s: for this answer; None is the client's own.

        Raises:
            TimedOut: no answer in time.
            ApiError: no answer, or not 200.
        """
        body = {
            **greedy(model, list(prompt), max_tokens),
            **({"kv_transfer_params": {"lmcache.tag.pdkit": tag}} if tag else {}),
            **({"cache_salt": salt} if salt else {}),
        }
        answer = self._json("POST", "/v1/completions", body, timeout_s or 0)
        with _understanding("/v1/completions"):
            logprobs, usage = answer["choices"][0]["logprobs"], answer["usage"]
            # Left out by some versions where there were none.
            details = usage.get("prompt_tokens_details") or {}
            return Completion(
                tuple(logprobs["tokens"]),
                tuple(dict(step) for step in logprobs["top_logprobs"]),
                int(usage["prompt_tokens"]),
                int(details.get("cached_tokens") or 0),
            )

    def forget(self, model: str, ranks: int, prompt: Sequence[int]) -> bool:
        """Have LMCache's server drop a prompt's KV from its memory; tell whether it did.

        It does not as long as Redis does not have all of it, or someone reads it.

        Raises:
            ApiError: no answer, or not 200.
        """
        asked = {"model": model, "ranks": ranks, "tokens": list(prompt)}
        answer = self._post("/pdkit/forget", asked)
        with _understanding("/pdkit/forget"):
            objects, in_redis, left = (int(answer[n]) for n in ("objects", "in_redis", "left"))
        return objects > 0 and in_redis == objects and left == 0

    def known_engines(self) -> list[int]:
        """Return the instances of engines whose KV memory LMCache's server can reach.

        Raises:
            ApiError: no answer, or not 200.
        """
        answer = self._json("GET", "/status")
        with _understanding("/status"):
            return [int(instance) for instance in answer["registered_gpu_ids"]]

    def lmcache_version(self) -> str:
        """Return the version of LMCache that its server runs.

        Raises:
            ApiError: no answer, or not 200.
        """
        return str(self._json("GET", "/lmc_version"))

    def metrics(self) -> MetricsPage:
        """Read the metrics page.

        Raises:
            ApiError: no answer.
        """
        page = self._answer("GET", "/metrics")
        _require_ok(page)
        with _understanding("/metrics"):
            return parsed_page(page.text)

    def cache_counters(self) -> CacheCounters:
        """Read the engine's prefix cache counters.

        Raises:
            ApiError: no answer, or a counter is missing: an engine that does not count external
                hits runs without a connector.
        """
        page = self.metrics()
        try:
            return CacheCounters.read(page)
        except LookupError as exc:
            raise ApiError(0, str(exc)) from exc

    def store_path(self) -> StorePath | None:
        """Read what the engine moved to and from Redis; None if LMCache's own client does that.

        Raises:
            ApiError: no answer.
        """
        return StorePath.read(whole_page(self.metrics).samples)

    def finished_requests(self) -> int:
        """Return the number of requests that the engine has finished since its start.

        Raises:
            ApiError: no answer.
        """
        return self.metrics().count(FINISHED)

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json("POST", path, body)

    def _json(self, method: str, path: str, body: Any = None, timeout_s: float = 0) -> Any:
        page = self._answer(method, path, body, timeout_s)
        _require_ok(page)
        with _understanding(path):
            return json.loads(page.text)

    def _answer(self, method: str, path: str, body: Any = None, timeout_s: float = 0) -> Page:
        from deploy.runtime.http_client import Page, ask

        more = {} if body is None else {"Content-Type": "application/json"}
        try:
            status, content = ask(
                method,
                self._url,
                path,
                timeout_s=timeout_s or self._timeout_s,
                headers={**self._headers, **more},
                body=None if body is None else json.dumps(body).encode(),
            )
        except OSError as exc:
            kind = TimedOut if isinstance(exc, TimeoutError) else ApiError
            why = f"{type(exc.__cause__).__name__}: {exc}"
            raise kind(0, f"no answer from {self._url} ({why})") from exc
        return Page(status, content.decode("utf-8", "replace"))


def _require_ok(page: Page) -> None:
    if page.status != _OK:
        raise ApiError(page.status, f"HTTP {page.status}: {page.text[:300]}")


@contextmanager
def _understanding(path: str) -> Iterator[None]:
    """Turn what an unexpected answer raises into an ApiError that says where it came from."""
    try:
        yield
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as exc:
        raise ApiError(
            _OK, f"{path} gave an unexpected answer ({type(exc).__name__}: {exc})"
        ) from exc
