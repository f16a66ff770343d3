"""The files in `lmcache_configs/` are complete: a stack's files have their keys, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config.engine_inputs import refused_option, refused_variable
from tests.unit.stack.conftest import Case

CLIENTS = ("pdkit", "lmcache")
ROLES = ("producer", "consumer")
# What a stack's plan decides. Only of these may a stack's file have another value.
PLANNED = {
    "chunk_size", "max_local_cpu_size", "use_layerwise", "save_decode_cache", "remote_url",
    "pdkit.url", "pdkit.namespace", "pdkit.lookup_s", "pdkit.load_s", "pdkit.store_s",
    "pdkit.silent_s",
}  # fmt: skip


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    own = settings.pop("extra_config", {})
    return {**settings, **own}


@pytest.fixture
def shipped(repo: Path) -> Callable[[str, str], dict[str, Any]]:
    """Return the settings of a file in `lmcache_configs/`."""

    def read(client: str, role: str) -> dict[str, Any]:
        text = (repo / "lmcache_configs" / f"{client}-{role}.yaml").read_text(encoding="utf-8")
        return flat(yaml.safe_load(text))

    return read


def rendered(case: Case, engine: str) -> dict[str, Any]:
    texts = case.document["x-pdkit"]["files"]
    return flat(yaml.safe_load(texts[f"{case.prepared_root}/run/{engine}/lmcache.yaml"]))


def test_there_is_a_file_for_each_client_and_role(repo: Path) -> None:
    found = {file.name for file in (repo / "lmcache_configs").iterdir()}
    assert found == {f"{client}-{role}.yaml" for client in CLIENTS for role in ROLES}


def test_the_server_uses_no_such_file_and_each_file_says_why(
    repo: Path, contained: Callable[..., Case]
) -> None:
    made = contained(vendor="cpu", connector="lmcache-mp")
    files = {Path(file).name for file in made.document["x-pdkit"]["files"]}
    assert "lmcache.yaml" not in files and "second-tier.yaml" in files
    server = made.services["kv-server"]["command"]
    assert {"--chunk-size", "--l2-adapter"} <= set(server)
    said = "`deploy render --vendor cpu --connector lmcache-mp` shows them."
    for file in (repo / "lmcache_configs").iterdir():
        assert said in file.read_text(encoding="utf-8").partition("\n\n")[0]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("client", CLIENTS)
class TestFiles:
    def test_a_shipped_file_is_that_of_the_smallest_stack(
        self, client: str, role: str, contained: Callable[..., Case], shipped: Any
    ) -> None:
        made = rendered(contained(vendor="cpu", redis={"client": client}), f"{role}-0")
        made.pop("pdkit.namespace", None)
        expected = shipped(client, role)
        expected.pop("pdkit.namespace", None)
        assert made == expected

    def test_another_stack_gets_other_values_only_where_the_plan_decides(
        self, client: str, role: str, contained: Callable[..., Case], shipped: Any
    ) -> None:
        layerwise = client == "pdkit"  # LMCache's own client is refused with it
        fields = {
            "layerwise": layerwise, "save_decode_cache": True, "name": "other",
            "lmcache": {"chunk_size": 512, "staging_gib": 8}, "redis": {"client": client},
        }  # fmt: skip
        made = rendered(contained(vendor="cuda", **fields), f"{role}-0")
        expected = shipped(client, role)
        assert made.keys() == expected.keys()
        assert {key for key in made if made[key] != expected[key]} <= PLANNED
        changed = {"chunk_size", "max_local_cpu_size", "save_decode_cache"}
        changed |= {"use_layerwise"} if layerwise else set()
        assert all(made[key] != expected[key] for key in changed)

    def test_nothing_takes_the_models_name_for_that_of_a_model(
        self, client: str, role: str, shipped: Any
    ) -> None:
        """LMCache gets a name for keys in its place: CacheGen would look its layers up by it."""
        settings = shipped(client, role)
        assert settings.get("remote_serde", "naive") == "naive"
        assert not {"enable_blending", "enable_controller"} & settings.keys()


@pytest.mark.parametrize("name", ["LMCACHE_REMOTE_SERDE", "LMCACHE_ENABLE_BLENDING"])
def test_users_cannot_turn_such_a_path_on(name: str) -> None:
    assert refused_variable(name)
    assert refused_option("--kv-transfer-config.x", shares_kv=True)[1]
