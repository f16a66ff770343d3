"""The identity of a stack's KV: everything that decides what its bytes mean, as named rows.

The digest of the rows is the seed of the hash from which engines make the keys of KV, and so the
namespace: KV that means something else has other keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.config.engine_args import grouped
from deploy.config.engine_inputs import ARGUMENTS, CHANGES_KV, VARIABLES, row_of
from deploy.config.model import Model
from deploy.connector.pdkit_connector.identity.model_files import files_digest
from deploy.planning.engines import EnginePlan
from deploy.planning.plan import Plan
from deploy.stack.engine import depends_on_context, engine_env, planned_argv
from deploy.stack.layout import Layout


@dataclass(frozen=True)
class Row:
    """A row of the identity: why it changes KV, and where its value is taken."""

    why: str
    taken_from: str


ROWS: Mapping[str, Row] = {
    "pdkit": Row(
        "the connector comes with pdkit, and another version may store KV in another way",
        "the installed pdkit",
    ),
    "stack": Row("stacks on one Redis keep their KV apart", "`name`"),
    "vendor": Row("another kind of GPU computes and arranges KV in another way", "`vendor`"),
    "software": Row(
        "other versions of vLLM and LMCache compute, arrange or name KV in another way",
        "containers: the image's content, else its name; processes: vLLM's and LMCache's versions "
        "in the engines' Python",
    ),
    "model": Row(
        "other weights compute other KV; the path of a folder does not count",
        "a folder's content; a Hugging Face id with its revision, and with the cache's content "
        "where engines have `HF_HUB_OFFLINE`",
    ),
    "files": Row(
        "adapters change weights, and other folders and files decide how the model is used",
        "the content of folders and files that `engine.args` names; containers: the image's",
    ),
    "context": Row(
        "some models compute other positions for another maximum length, such as LongRoPE",
        "`engine.max_model_len`, else what the plan derives from memory; not for models whose "
        "positions do not depend on it",
    ),
    "chunk_size": Row("a key stands for a chunk of so many tokens", "`lmcache.chunk_size`"),
    "layerwise": Row("a key holds one layer instead of all", "`layerwise`"),
    "connector": Row("each connector arranges KV in its own way", "`connector`"),
    "planned_args": Row(
        "data type, block size, ranks, revision and all else that the plan sets",
        "vLLM's arguments from the plan, without those that do not change KV",
    ),
    "args": Row(
        "quantization, KV data type, overrides and all else that changes numbers",
        "`engine.args`, without those that do not change KV",
    ),
    "env": Row(
        "variables may choose kernels, layouts and numbers",
        "variables from the plan and `engine.env`, without those that do not change KV",
    ),
}


def key_prefix(stack: str) -> str:
    """Return the prefix of all keys of a stack, over all its starts.

    Those of LMCache's own client do not.
    """
    return f"pdkit:{stack}:"


def kv_namespace(stack: str, seed: str) -> str:
    """Return the prefix of all keys that engines with this seed can load."""
    return key_prefix(stack) + seed


def hash_seed(plan: Plan, layout: Layout) -> str:
    """Return the PYTHONHASHSEED of every engine of the stack.

    The first chunk's key is hashed from it and each further one from the key before, in every
    version of vLLM and LMCache, so engines with different seeds never find each other's KV.
    """
    hashed = json.dumps(kv_identity(plan.engines[0], plan, layout), sort_keys=True)
    digest = hashlib.sha256(hashed.encode()).digest()
    return str(int.from_bytes(digest[:4], "big"))  # Python takes seeds of 32 bits


def kv_identity(engine: EnginePlan, plan: Plan, layout: Layout) -> dict[str, object]:
    """Return the value of each row of `ROWS`; the same for every engine of a stack."""
    planned = grouped(planned_argv(engine, plan, layout, ""))
    theirs = _changing(grouped(plan.spec.engine.args))
    return {
        "pdkit": layout.kit.version,
        "stack": plan.name,
        "vendor": plan.vendor.name,
        "software": layout.software_identity,
        "model": _model(plan.model),
        "files": files_digest(plan.model.named),
        "context": plan.max_model_len if depends_on_context(plan) else None,
        "chunk_size": plan.chunk_size,
        "layerwise": plan.layerwise,
        "connector": plan.connector,
        "planned_args": _changing(planned),
        "args": theirs,
        "env": _changing_env(engine, plan, layout),
    }


def _model(model: Model) -> list[str]:
    """Return the content of a folder; of the hub's models, whose version may be unknown, the id."""
    if model.source != "hub":
        return ["", model.version]
    return [model.ref, model.version, *filter(None, [files_digest(model.files)])]


def _changing(groups: list[list[str]]) -> list[list[str]]:
    """Return options and their values without those that do not change KV.

    `--no-x` is of the row of `--x`. What follows the first value of one that is left out stays.
    """
    found = []
    for name, *values in groups:
        row = row_of(ARGUMENTS, name)
        if row is CHANGES_KV and name.startswith("--no-"):
            row = row_of(ARGUMENTS, f"--{name.removeprefix('--no-')}")
        if not row.unrelated:
            found.append([name, *values])
        elif len(values) > 1:
            found.append(values[1:])
    return found


def _changing_env(engine: EnginePlan, plan: Plan, layout: Layout) -> dict[str, str]:
    theirs = plan.spec.engine.env
    planned = engine_env(engine, plan, layout, "", "")
    # The plan adds the connector's folder, whose content is that of pdkit's version.
    del planned["PYTHONPATH"]
    every = {**planned, **theirs}
    return {name: every[name] for name in every if not row_of(VARIABLES, name).unrelated}
