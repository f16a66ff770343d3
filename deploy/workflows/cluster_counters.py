"""What the engines of an exported stack count, asked in their pods, where their key is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from deploy.errors import PdkitError
from deploy.metrics.page import MetricsPage, parsed_page
from deploy.runtime.kubectl import Kubectl
from deploy.runtime.whole_page import whole_page
from deploy.stack.cluster.objects import Object
from deploy.stack.cluster.seen import main_container, role_of
from deploy.stack.layout import ENGINE_PORT

_AT_ONCE = 8
_PAGE_BYTES = 16 << 20  # an engine's metrics have some 100 KiB
# The key stays in the pod: it is neither in an argument nor in what is printed.
ASK = """\
import os, sys, urllib.request
with open(os.environ["PDKIT_ENGINE_KEY_FILE"]) as file:
    key = {"Authorization": "Bearer " + file.read().strip()}
page = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/metrics", headers=key)
directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(directly.open(page, timeout=10).read().decode())
"""


def engine_pages(
    kubectl: Kubectl, pods: Sequence[Object]
) -> tuple[dict[str, MetricsPage], list[str]]:
    """Return the metrics pages of engines by their pods, and why some have none.

    Args:
        pods: of engines that are ready.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda pod: _page(kubectl, pod), pods))
    pages: dict[str, MetricsPage] = {}
    silent: dict[str, list[str]] = defaultdict(list)
    for pod, answer in zip(pods, answers, strict=True):
        name = pod["metadata"]["name"]
        if isinstance(answer, MetricsPage):
            pages[name] = answer
        else:
            silent[answer].append(name)
    return pages, [f"no counters of {', '.join(names)}: {why}" for why, names in silent.items()]


def _page(kubectl: Kubectl, pod: Object) -> MetricsPage | str:
    """Return an engine's page, or why there is none."""
    python, *_ = main_container(pod["spec"], role_of(pod)).get("command") or ["python3"]
    # -I: without the connector, which would be imported first.
    command = ("--container=engine", "--", python, "-I", "-c", ASK, str(ENGINE_PORT))
    try:
        name = pod["metadata"]["name"]
        return whole_page(
            lambda: parsed_page(kubectl.run("exec", name, *command, most_bytes=_PAGE_BYTES))
        )
    except PdkitError as exc:
        return (*exc.details[-1:], exc.message)[0]
    except ValueError as exc:
        return f"its page is not Prometheus' format: {exc}"
