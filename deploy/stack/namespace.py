"""The namespace of a stack's KV: what separates its keys from those of any other kind of KV."""

from __future__ import annotations

import hashlib
import json

from deploy.planning.plan import Plan
from deploy.stack.layout import Layout


def key_prefix(stack: str) -> str:
    """Return what the keys of all KV of a stack begin with, whatever it was started with.

    Those of LMCache's own client do not.
    """
    return f"pdkit:{stack}:"


def kv_namespace(plan: Plan, layout: Layout) -> str:
    """Return what the keys of all KV begin with that this plan's engines can load."""
    return key_prefix(plan.name) + hash_seed(plan, layout)


def hash_seed(plan: Plan, layout: Layout) -> str:
    """Return the PYTHONHASHSEED of every engine of the stack.

    The first chunk's key is hashed from it and each further one from the key before, in every
    version of vLLM and LMCache, so engines with different seeds never find each other's KV. Equal
    seeds mean KV that means the same: same image, vendor, model, numbers and layout.
    """
    hashed = {
        # The connector is the kit's: another version may move KV in another way.
        "pdkit": layout.kit.version,
        "stack": plan.name,
        "vendor": plan.vendor.name,
        "image": layout.image_identity,
        "model": [plan.model.ref, plan.model.version],
        "dtype": plan.dtype,
        "tp": plan.tp,
        "block_size": plan.block_size,
        "chunk_size": plan.chunk_size,
        "layerwise": plan.layerwise,
        **({"connector": plan.connector} if plan.kv_server else {}),
        # A user's own arguments and variables may choose the cache's numbers or layout, and the
        # vendor's pins the code that writes it.
        "args": [*plan.vendor.pinned_args, *plan.spec.engine.args],
        "env": sorted({**plan.vendor.pinned_env, **plan.spec.engine.env}.items()),
    }
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).digest()
    return str(int.from_bytes(digest[:4], "big"))  # Python takes seeds of 32 bits
