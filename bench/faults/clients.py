"""Clients that ask the same prompts again and again, half of them for streams."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import httpx

from bench.faults.history import Asked, History

REFUSED = 503
_TIMEOUT_S = 120.0
# Without a pause, clients that are refused would take the CPU that engines need to start again.
_REFUSED_S = 0.2


class Clients:
    """Clients that ask from the beginning of a `with` block to its end.

    Each keeps a connection while that is good, as OpenAI's library does, and never asks twice.
    """

    def __init__(  # noqa: PLR0913 - a load is all of these
        self, url: str, model: str, prompts: Sequence[str], history: History, *, count: int,
        tokens: int, seed: int, pause_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._url, self._model, self._prompts = url, model, prompts
        self._history, self._tokens, self._pause_s = history, tokens, pause_s
        self._ended = threading.Event()
        self._threads = [
            # The same choices each time.
            threading.Thread(target=self._run, args=(number, random.Random(seed + number)))  # noqa: S311 - no secret
            for number in range(count)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(2 * _TIMEOUT_S)

    def _run(self, number: int, choice: random.Random) -> None:
        with httpx.Client(base_url=self._url, trust_env=False, timeout=_TIMEOUT_S) as http:
            while not self._ended.is_set():
                asked = self.ask(http, choice.randrange(len(self._prompts)), number % 2)
                self._history.add(asked)
                self._ended.wait(_REFUSED_S if asked.status == REFUSED else self._pause_s)

    def ask(self, http: httpx.Client, prompt: int, stream: int) -> Asked:
        """Send one request and say what came of it."""
        body = {
            "model": self._model, "prompt": self._prompts[prompt], "max_tokens": self._tokens,
            "temperature": 0, "ignore_eos": True, "stream": bool(stream),
        }  # fmt: skip
        sent, text, trouble, status = time.monotonic(), "", "", 0
        try:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                status = answer.status_code
                if stream and status == 200:
                    text, trouble = _events(answer)
                else:
                    said = json.loads(answer.read())
                    text = said["choices"][0]["text"] if status == 200 else ""
                    trouble = "" if status == 200 else json.dumps(said)[:200]
        except (httpx.HTTPError, ValueError, LookupError) as exc:
            trouble = repr(exc)[:200]
        return Asked(prompt, sent, time.monotonic(), status, text, trouble, bool(stream))


def _events(answer: httpx.Response) -> tuple[str, str]:
    """Return the text of a stream, and what was wrong with its end."""
    text = ""
    for line in answer.iter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return text, ""
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return text, str(event["error"]["message"])
        text += event["choices"][0]["text"]
    return text, "the stream ended without an end"
