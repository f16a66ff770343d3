"""Makes engines that outlived their Redis connect to the new one."""

from __future__ import annotations

import contextlib
import time

from deploy.runtime.engine_api import ApiError
from deploy.runtime.home import Home
from deploy.stack.lmcache_server import HEARTBEAT_S
from deploy.workflows.check.probes import lengths
from deploy.workflows.check.run import open_session
from deploy.workflows.running import RunningStack

_RENEWALS = 5


def renew_store_connections(home: Home, running: RunningStack) -> None:
    """Send throw-away prompts until engines that outlived their Redis use the new one.

    An engine notices a dead connection by the request that fails on it. Where another host has the
    router, it is left to find it by itself.

    Raises:
        StackUnhealthy: the stack stopped answering.
    """
    if not running.stack.has_front:
        return
    # An engine that lost LMCache's server comes back to it with a ping.
    pause_s = HEARTBEAT_S if running.prepared.plan.kv_server else 0
    with open_session(home, running, lambda _: None) as session:
        for attempt, length in enumerate(lengths(session)[:1] * _RENEWALS):
            time.sleep(pause_s if attempt else 0)
            prompt, tag = session.fresh(length), session.keys.new_tag()
            found = 0
            for name in session.engines:
                with contextlib.suppress(ApiError):
                    cached = session.ask(name, prompt, tag=tag).cached_tokens
                    found += name in session.consumers and cached > 0
            if found == len(session.consumers):
                break
        session.keys.remove(session.store)
