"""Stands in for LMCache's server: keys in memory, as a Redis takes them, and its pages."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

KEYS: set[bytes] = set()
CHUNK = 64  # tokens; each question for one is a lookup
COUNTS = {"asked": 0, "server": 0, "redis": 0}
FAULTS = Path(os.environ["STAND_IN_FAULTS"])
USED = """lmcache_mp_l1_memory_usage_bytes{{backend="dram"}} {}
lmcache_mp_lookup_requested_tokens_total{{cache_salt=""}} {}
lmcache_mp_lookup_hit_l1_tokens_total{{cache_salt=""}} {}
lmcache_mp_lookup_hit_l2_tokens_total{{cache_salt=""}} {}
pdkit_store_chunks_total{{operation="store",result="stored"}} {}
"""


FULL = """lmcache_mp_l1_allocation_failure_chunks_total{during="l1_store"} 3
"""


def has_fault(name: str) -> bool:
    try:
        return name in FAULTS.read_text().split()
    except FileNotFoundError:
        return False


class Requests(StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            if words[0] == b"SET":
                KEYS.add(words[1])
            self._count(words)
            self.wfile.write(b":%d\r\n" % (words[1] in KEYS))

    def _count(self, words: list[bytes]) -> None:
        COUNTS["asked"] += CHUNK
        if words[0] == b"EXISTS" and words[1] in KEYS:
            COUNTS["redis" if has_fault("server:forgets") else "server"] += CHUNK

    def _word(self) -> bytes:
        self.rfile.readline()
        return self.rfile.readline().strip()


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        used = USED.format(len(KEYS), *COUNTS.values(), len(KEYS)) + FULL * has_fault("server:full")
        known = {
            "/healthcheck": "{}",
            "/metrics": "" if has_fault("server:silent") else used,
            "/lmc_version": '"0.5.6"',
            "/status": '{"registered_gpu_ids": [1, 2]}',
        }
        self._answer(known.get(self.path, ""))

    def do_POST(self) -> None:
        """Forget nothing, and say so, unless a test has Redis lag behind."""
        self.rfile.read(int(self.headers["Content-Length"]))
        found = {"objects": 2, "in_redis": 1 if has_fault("redis:lags") else 2, "left": 0}
        self._answer(json.dumps(found) if self.path == "/pdkit/forget" else "")

    def _answer(self, text: str) -> None:
        body = text.encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingUnixStreamServer):
    daemon_threads = True

    def server_bind(self) -> None:
        with suppress(FileNotFoundError):
            Path(self.server_address).unlink()
        super().server_bind()


if __name__ == "__main__":
    requests, pages = sys.argv[1:3]
    threading.Thread(target=Server(requests, Requests).serve_forever, daemon=True).start()
    Server(pages, Pages).serve_forever()
