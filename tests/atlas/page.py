"""docs/reference/models.md: the models of the atlas, their needs, and what takes them."""
# ruff: noqa: E501 - lines of the page

from __future__ import annotations

from dataclasses import replace

from deploy.config.fields import IN_ENGINES, MP
from deploy.config.kinds import kind_of
from deploy.config.model import Model
from deploy.config.shape import estimated_shape, read_shape
from deploy.config.spec import StackSpec, settle
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError
from deploy.planning.checks import check_kind
from deploy.planning.inventory import Inventory
from tests.atlas import Row, rows

BFLOAT16 = 2
HEAD = """# Models

Public models, what vLLM {vllm} makes of their `config.json`, and which [connector](../how-to/multiprocess-lmcache.md) of pdkit takes them on
NVIDIA GPUs: "planned" means that the plan refuses nothing, not that the kit's tests have run the model ([kinds of models](model-kinds.md) has
what they ran). Bytes of KV are those of one token over all layers, in bfloat16 and without tensor parallelism. They and the context come from
vLLM's own KV cache specification; where vLLM could not give one on the machine that wrote this page, they are the kit's estimate, which is
marked with *. `deploy up` asks the engines' own vLLM; `deploy plan` estimates until then.

The values of each `config.json` are in `tests/atlas/models.yaml`, as the model's page on the Hugging Face hub had them or its class in transformers has by default. Write this page anew:
`UPDATE_GOLDENS=1 .venv/bin/python -m pytest tests/unit/config/test_atlas.py -m "full or not full"`.

| model | kind | bytes of KV a token | context | `lmcache` | `lmcache-mp` |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    table = rows()
    versions = {row.reading["vllm"] for row in table}
    return HEAD.format(vllm=" and ".join(sorted(versions))) + "".join(map(_line, table))


def _line(row: Row) -> str:
    told, estimated = read_shape(row.reading), estimated_shape(row.config)
    kind = kind_of(row.config)
    refused = kind.not_text or kind.state or row.reading["trouble"]
    shape = None if refused else told or estimated
    mark = "" if told else "*"
    size = f"{shape.kv_bytes_per_token(BFLOAT16):,}{mark}" if shape else "-"
    longest = f"{shape.max_positions:,}{mark}" if shape and shape.max_positions else "-"
    model = Model(row.name, row.name, "hub", told or estimated, kind=kind)
    cells = (
        row.name, row.family, size, longest, _verdict(row, model, IN_ENGINES),
        _verdict(row, model, MP),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _verdict(row: Row, model: Model, connector: str) -> str:
    if row.reading["trouble"]:
        return "refused: this vLLM does not run it"
    fields = {"vendor": "cuda", "runtime": "compose", "connector": connector}
    spec = settle(
        StackSpec.model_validate(fields), vendor="cuda", runtime="compose", connector=connector
    )
    machine = Inventory(64, 1 << 20)
    try:
        check_kind(
            spec,
            replace(model, ref="m"),
            vendor_named("cuda"),
            machine,
            shares_kv=True,
        )
    except ConfigError:
        return f"refused: {_why(model)}"
    return "planned"


def _why(model: Model) -> str:
    kind = model.kind
    if kind.not_text:
        return "generates no text"
    if kind.state:
        return "layers with a state"
    if kind.window and not model.idle_window:
        return "a window in every layer"
    if model.shape and model.shape.others:
        return "KV of several sizes"
    return "several KV groups"
