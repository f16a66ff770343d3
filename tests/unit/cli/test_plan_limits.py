"""`deploy plan` states what KV takes on its way through Redis."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ended
from tests.unit.planning.test_limits import DEEPSEEK_V2_LITE, LLAMA_70B, folder_with


@pytest.mark.parametrize(
    ("config", "a_token", "value", "ranks"),
    [(LLAMA_70B, 327_680, 41_943_168, 8), (DEEPSEEK_V2_LITE, 31_104, 7_962_752, 4)],
    ids=["llama-70b", "deepseek-v2-lite"],
)
def test_plan_states_every_limit(
    deploy_here: Callable[..., Ended],
    tmp_path: Path,
    config: dict[str, Any],
    a_token: int,
    value: int,
    ranks: int,
) -> None:
    folder = folder_with(tmp_path / "model", config)
    asked = ("plan", "--vendor", "cuda", "--gpus", "8", "--tp", "2", "--model", str(folder))
    where = {"cwd": tmp_path, "home": tmp_path / "home"}
    said = deploy_here(*asked, "--json", **where)
    assert said.code == 0, said.stderr
    data = json.loads(said.stdout)["data"]
    assert (data["kv_bytes_per_token"], data["value_bytes"]) == (a_token, value)
    assert (data["staging"]["ranks"], data["dtype"]) == (ranks, "bfloat16")
    assert data["staging"]["bytes_per_rank"] > 0 and data["redis"]["memory_mib"] > 0
    assert set(data["deadlines"]) == {"lookup_s", "load_s", "store_s", "silent_s"}
    shown = deploy_here(*asked, **where).stdout
    estimated = " (estimated from config.json), bfloat16"
    assert f"{a_token} bytes of KV per token{estimated}" in shown
    assert f"staging for each of {ranks} ranks" in shown
    assert f"values of {value:,} bytes" in shown
    assert f"load {data['deadlines']['load_s']:g} s" in shown
