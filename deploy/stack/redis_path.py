"""The settings of the connector's own path to Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.planning.limits import TransferLimits
from deploy.planning.plan import Plan
from deploy.stack.layout import KV_KEY, Layout


def redis_path_settings(
    plan: Plan, layout: Layout, urls: Sequence[str], limits: TransferLimits, namespace: str
) -> dict[str, Any]:
    """Return the settings as LMCache's configuration, or its server's second tier, has them."""
    signed = plan.spec.redis.integrity == "mac"
    return {
        # Keys are spread over several in their order, which is the same for all engines.
        "pdkit.url": urls[0] if len(urls) == 1 else list(urls),
        "pdkit.namespace": namespace,
        "pdkit.lookup_s": limits.lookup_s,
        "pdkit.load_s": limits.load_s,
        "pdkit.store_s": limits.store_s,
        "pdkit.silent_s": limits.silent_s,
        **({"pdkit.mac_key_file": layout.secret(KV_KEY)} if signed else {}),
    }
