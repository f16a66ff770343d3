"""Stands in for vllm-router: a producer computes one token, a consumer answers; or one worker."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from stand_in_http import Answer, serve


def post(url: str, body: Any) -> Answer:
    request = urllib.request.Request(url, json.dumps(body).encode())  # noqa: S310 - our own
    try:
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 - our own
            return response.status, response.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", action="append", default=[])
    parser.add_argument("--decode", action="append", default=[])
    parser.add_argument("--worker-urls", nargs="+", default=[])
    options, _ = parser.parse_known_args()
    workers = itertools.cycle(options.worker_urls)
    producers, consumers = itertools.cycle(options.prefill), itertools.cycle(options.decode)

    def answer(path: str, body: Any) -> Answer:
        if body is None:
            return 200, ""
        faults = Path(os.environ["STAND_IN_FAULTS"])
        if options.worker_urls:
            stuck = faults.exists() and "router:one-worker" in faults.read_text().split()
            return post((options.worker_urls[0] if stuck else next(workers)) + path, body)
        if faults.exists() and "router:bypasses" in faults.read_text().split():
            return post(next(consumers) + path, body)
        status, said = post(next(producers) + path, {**body, "max_tokens": 1})
        return post(next(consumers) + path, body) if status == 200 else (status, said)

    serve(options.port, answer)


if __name__ == "__main__":
    main()
