"""Stands in for vLLM with LMCache: real keys in the real Redis, answers by the prompt.

A chunk is one key, or in layerwise mode one a layer; there, without fix B16c, tags are looked up,
not stored.

What is wrong with it is read at each request from the file that STAND_IN_FAULTS names: words such
as `consumer:wrong-kv`. A fault at start-up is read from STAND_IN_DIES.

A request of the user "gone" is one whose client leaves after its admission: as with vLLM its tokens
are counted, and not that it finished.

STAND_IN_REPORT is what it reports of the connector, NAMESPACE in it the one that it was given. A
`key_name` there is the model's name in its keys.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from stand_in_http import Answer, serve
from stand_in_redis import Redis

BLOCK = 16
VOCABULARY_SIZE = 1 << 20
LAYERS = 4  # of the tiny model
ALONE = {
    "chunk_size": 64,
    "use_layerwise": False,
    "extra_config": {"pdkit.url": "", "pdkit.namespace": ""},
}
REPORT = os.environ.get("STAND_IN_REPORT", 'pdkit_fix_info{fix="B17",state="applied"} 1')
KEY_NAME = re.search(r"\bkv-[0-9a-f]+\b", REPORT)
MODEL = KEY_NAME[0] if KEY_NAME else "model"


class Engine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        config = json.loads(options.kv_transfer_config)
        self.role = config.get("kv_role", "kv_alone").removeprefix("kv_")
        file = os.environ.get("LMCACHE_CONFIG_FILE")
        settings = yaml.safe_load(Path(file).read_text()) if file else ALONE
        self.chunk = int(settings["chunk_size"])
        self.layerwise = bool(settings["use_layerwise"])
        self.stores_tags = not self.layerwise or 'fix="B16c",state="applied"' in REPORT
        self.urls = settings["extra_config"]["pdkit.url"]
        self.namespace = settings["extra_config"]["pdkit.namespace"]
        if "PDKIT_KV_SERVER_SOCKET" in os.environ:
            self.urls = f"unix://{os.environ['PDKIT_KV_SERVER_SOCKET']}"
            self.namespace = config["kv_connector_extra_config"]["pdkit.namespace"]
        self.counters = dict.fromkeys(("queries", "hits"), 0)
        self.local_hits = 0
        self.finished = 0
        self.prompt_tokens = 0
        # Salts and prompts that this engine computed or loaded: its own prefix cache.
        self.own: list[tuple[str, list[int]]] = []

    def answer(self, path: str, body: Any, by_router: bool) -> Answer:
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            # A key that neither the router nor the kit has.
            own_key = "VLLM_API_KEY" in os.environ or self.has_fault("own-key")
            return 401 if own_key else 200, {
                "data": [{"id": "tiny", "max_model_len": int(self.options.max_model_len)}]
            }
        if path == "/metrics":
            return 200, self.metrics()
        if path == "/tokenize":
            return 200, {"tokens": list(body["prompt"].encode())}
        if path == "/v1/completions":
            return self.complete(body, by_router)
        return 404, "no such path"

    def complete(self, body: dict[str, Any], by_router: bool) -> Answer:
        if self.has_fault("fails") or (
            by_router and self.has_fault(f"refuses-router-{self.options.port}")
        ):
            return 500, "the engine is out of order"
        if self.has_fault("hangs"):
            while self.has_fault("hangs"):
                time.sleep(0.05)
            return 500, "the client is gone"
        while self.has_fault("waits"):
            time.sleep(0.05)
        if body["prompt"] == "warm up":  # by the router, if it saw that the engine was gone
            return 200, completion([0], 1, 0.0, 0)
        prompt = body["prompt"]
        prefilled = by_router and body["max_tokens"] == 1
        if max(prompt) >= VOCABULARY_SIZE or (prefilled and self.has_fault("refuses-prefill")):
            return 400, {"error": {"message": "not like this"}}
        tag = (body.get("kv_transfer_params") or {}).get("lmcache.tag.pdkit", "")
        ends = range(self.chunk, len(prompt) + 1, self.chunk)
        chunks = [self.keys(prompt[:end], tag) for end in ends]
        salt = body.get("cache_salt", "")
        mine = max((common(prompt, other) for of, other in self.own if of == salt), default=0)
        loaded = 0
        if salt or self.role == "alone":
            pass  # shared with nobody
        elif self.role == "producer" and self.options.enable_prefix_caching:
            loaded = self.chunk if self.has_fault("loads") else 0
        else:
            loaded = max(0, self.reached(self.load, chunks, len(prompt)) - mine)
        if self.role in ("producer", "both") and not (salt or self.has_fault("stores-nothing")):
            for end in ends:
                self.reached(self.store, self.keys(prompt[:end], tag if self.stores_tags else ""))
        self.counters["queries"] += len(prompt) - mine
        self.counters["hits"] += loaded
        self.local_hits += mine
        self.prompt_tokens += len(prompt)
        self.finished += body.get("user") != "gone"
        if self.options.enable_prefix_caching:
            self.own.append((salt, prompt))
        damage = self.damage(mine, loaded)
        whole = completion(prompt, body["max_tokens"], damage, min(mine, len(prompt)) + loaded)
        return 200, streamed(whole, body["max_tokens"]) if body.get("stream") else whole

    def reached(self, do: Callable[..., int], *arguments: Any) -> int:
        """Store or load; where LMCache's server is gone, an engine goes on without."""
        try:
            return do(*arguments)
        except (ConnectionError, FileNotFoundError):
            if "PDKIT_KV_SERVER_SOCKET" in os.environ:
                return 0
            raise

    def damage(self, mine: int, loaded: int) -> float:
        """Return what is wrong with an answer by where its KV came from."""
        if any((loaded and self.has_fault("wrong-kv"), mine and self.has_fault("wrong-own-kv"))):
            return 3.0
        if self.has_fault(f"other-weights-{self.options.port}"):
            return 3.0
        return 0.3 if (mine or loaded) and self.has_fault("noisy") else 0.0

    def store(self, keys: list[str]) -> int:
        for key in keys[:1] if self.has_fault("stores-one-layer") else keys:
            Redis.of(self.urls, key).ask("SET", key, "kv")
        return len(keys)

    def load(self, chunks: list[list[str]], prompt_tokens: int) -> int:
        if self.has_fault("flushes"):
            Redis.of(self.urls, "").ask("FLUSHALL")
        found = 0
        while found < len(chunks) and self.has_all(chunks[found]):
            found += 1
        return min(found * self.chunk, prompt_tokens - 1)

    def has_all(self, keys: list[str]) -> bool:
        return all(Redis.of(self.urls, key).ask("EXISTS", key) == ":1" for key in keys)

    def keys(self, prefix: list[int], tag: str) -> list[str]:
        """Return the keys of the chunk that ends a prefix; a tag comes last, as on GPUs."""
        seed = os.environ["PYTHONHASHSEED"]
        digest = hashlib.sha256(f"{seed} {prefix}".encode()).hexdigest()
        chunk, tags = f"{self.namespace}:{MODEL}@{digest}@float32", f"@pdkit%{tag}" if tag else ""
        layers = [f"@{layer}" for layer in range(LAYERS)] if self.layerwise else [""]
        return [f"{chunk}{layer}{tags}" for layer in layers]

    def has_fault(self, name: str) -> bool:
        try:
            faults = Path(os.environ["STAND_IN_FAULTS"]).read_text()
        except FileNotFoundError:
            return False
        return f"{self.role}:{name}" in faults.split()

    def metrics(self) -> str:
        lines = []
        caches = self.options.enable_prefix_caching
        own = {"queries": self.prompt_tokens if caches else 0, "hits": self.local_hits}
        for name, value in self.counters.items():
            for metric, shown in (
                (f"external_prefix_cache_{name}", value),
                (f"prefix_cache_{name}", own[name]),
            ):
                lines += [
                    f"# TYPE vllm:{metric}_total counter",
                    f'vllm:{metric}_total{{engine="0"}} {shown}',
                ]
        lines += [
            "# TYPE vllm:cache_config_info gauge",
            f'vllm:cache_config_info{{engine="0",enable_prefix_caching="{caches}"}} 1.0',
            "# TYPE vllm:prompt_tokens_total counter",
            f"vllm:prompt_tokens_total {self.prompt_tokens}",
            "# TYPE vllm:request_success_total counter",
            f'vllm:request_success_total{{finished_reason="length"}} {self.finished}',
        ]
        return "\n".join((*lines, REPORT.replace("NAMESPACE", self.namespace))) + "\n"


def common(prompt: list[int], other: list[int]) -> int:
    """Return the tokens of whole blocks that two prompts begin with, but not all of a prompt."""
    pairs = enumerate(zip(prompt, other, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(other)))
    return min(same, len(prompt) - 1) // BLOCK * BLOCK


def completion(prompt: list[int], count: int, damage: float, cached: int) -> dict[str, Any]:
    digest = hashlib.sha256(str(prompt).encode()).digest()
    names = [f"token_id:{byte}" for byte in digest[:count]]
    steps = [{name: -0.1 - damage, "token_id:999": -4.0} for name in names]
    return {
        "choices": [{"logprobs": {"tokens": names, "top_logprobs": steps}}],
        "usage": {
            "prompt_tokens": len(prompt),
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def streamed(whole: dict[str, Any], count: int) -> str:
    """Return a completion as server-sent events, a token each."""
    tokens = [{"choices": [{"text": "x", "token_ids": [number]}]} for number in range(count)]
    usage = {**whole["usage"], "completion_tokens": count}
    events = [*map(json.dumps, (*tokens, {"choices": [], "usage": usage})), "[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in ("--port", "--max-model-len"):
        parser.add_argument(option, required=True)
    parser.add_argument("--kv-transfer-config", default="{}")
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    options, _ = parser.parse_known_args()
    engine = Engine(options)
    if os.environ.get("STAND_IN_DIES") == engine.role:
        print("Loading weights", flush=True)
        told = os.environ.get("STAND_IN_DIES_OF", "RuntimeError: the weights are corrupt")
        sys.exit(told.format(pid=os.getpid()))
    serve(int(options.port), engine.answer)


if __name__ == "__main__":
    main()
