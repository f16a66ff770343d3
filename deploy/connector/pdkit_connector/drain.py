"""Wait until an engine has no requests: `python -m pdkit_connector.drain PORT SECONDS`.

Kubernetes runs it in an engine's pod before it ends the engine. From then on its Service no longer
names the pod; the first seconds are for routers to notice that.
"""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from collections.abc import Callable

from pdkit_connector.engine_key import read_key

# A node may keep the addresses of a name for 30 s.
_NOTICED_S = 35.0
_EVERY_S = 1.0
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)

Sleep = Callable[[float], None]
Clock = Callable[[], float]


def wait(
    port: int, limit_s: float, sleep: Sleep = time.sleep, clock: Clock = time.monotonic
) -> bool:
    """Wait for the last request, or the end of the engine; return False if some are left."""
    sleep(_NOTICED_S)
    ends = clock() + limit_s
    while clock() < ends:
        try:
            if not requests_of(port):
                return True
        except TimeoutError:
            pass  # it is busy
        except OSError:
            return True
        sleep(_EVERY_S)
    return False


def requests_of(port: int) -> float:
    """Count the requests that the engine works on, or holds back.

    Raises:
        OSError: it does not answer.
    """
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {read_key()}"}
    )
    past_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with past_proxies.open(asked, timeout=5) as page:
        return sum(map(float, _REQUESTS.findall(page.read().decode())))


if __name__ == "__main__":
    wait(int(sys.argv[1]), float(sys.argv[2]))
