"""`deploy init` writes a deploy.yaml for this machine, with which `up` works as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import yaml

from deploy.planning.inventory import Inventory
from deploy.workflows import init as init_module
from tests.conftest import Ended
from tests.unit.stack.cases import machine_with

Run = Callable[..., Ended]
Init = Callable[..., Ended]

CPUS = Inventory(cpus=16, memory_mib=65536)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip


def cache_model(cache: Path, repo_id: str, config: object = LLAMA, weights: int = 1 << 20) -> None:
    """Put a model into a Hugging Face cache, with a file of that many bytes for its weights."""
    folder = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(config))
    if weights:
        with (snapshot / "model.safetensors").open("wb") as file:
            file.truncate(weights)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def init(deploy_here: Run, tmp_path: Path, cache: Path) -> Init:
    """Run `deploy init` in an empty folder of a machine."""

    def run(*options: str, machine: Inventory = CPUS, command: str = "init") -> Ended:
        with mock.patch.object(init_module, "detect_inventory", lambda: machine):
            return deploy_here(
                command, *options, cwd=tmp_path, home=tmp_path / "home", HF_HUB_CACHE=str(cache)
            )

    return run


def settings(folder: Path, name: str = "deploy.yaml") -> dict[str, object]:
    document = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
    return {key: value for key, value in document.items() if value is not None}


def test_init_on_a_machine_without_gpus_writes_cpu_and_tiny(init: Init, tmp_path: Path) -> None:
    ended = init()
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout == (
        "wrote deploy.yaml with vendor: cpu, model: tiny\n"
        "found: no GPU, 16 CPUs, 64 GiB of memory\n\n"
        "see what it plans   deploy plan\nstart it            deploy up\n"
    )
    assert settings(tmp_path) == {"vendor": "cpu", "model": "tiny"}


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_init_writes_vendor_gpus_and_model(init: Init, tmp_path: Path, vendor: str) -> None:
    ended = init("--json", machine=machine_with(vendor, 0, 1, 2, 3))  # type: ignore[arg-type]
    found = {"vendor": vendor, "gpus": 4, "model": "Qwen/Qwen3-0.6B"}
    assert settings(tmp_path) == found
    data = json.loads(ended.stdout)["data"]
    assert (data["settings"], data["file"]) == (found, "deploy.yaml")
    assert "4 x " in data["found"]


def test_init_takes_no_more_gpus_than_a_stack_may_have(init: Init, tmp_path: Path) -> None:
    init(machine=machine_with("cuda", *range(72)))
    assert settings(tmp_path)["gpus"] == 64


def test_the_written_file_can_be_used_at_once(init: Init, tmp_path: Path) -> None:
    """Without -f: it sets nothing that needs the user's consent."""
    init()
    planned = init("--json", command="plan")
    assert planned.code == 0
    assert json.loads(planned.stdout)["data"]["vendor"] == "cpu"


class TestModels:
    MACHINE = machine_with("cuda", 0, 1)

    def test_a_cached_model_that_fits_is_chosen(
        self, init: Init, tmp_path: Path, cache: Path
    ) -> None:
        cache_model(cache, "a/too-large", weights=1 << 38)
        cache_model(cache, "big/llama")
        init(machine=self.MACHINE)
        assert settings(tmp_path)["model"] == "big/llama"
        text = (tmp_path / "deploy.yaml").read_text()
        assert "# in the Hugging Face cache: a/too-large, big/llama\n" in text

    def test_the_default_model_is_chosen_if_cached_or_nothing_fits(
        self, init: Init, tmp_path: Path, cache: Path
    ) -> None:
        cache_model(cache, "a/too-large", weights=1 << 38)
        init(machine=self.MACHINE)
        assert settings(tmp_path)["model"] == "Qwen/Qwen3-0.6B"
        cache_model(cache, "big/llama")
        cache_model(cache, "Qwen/Qwen3-0.6B")
        init("-f", "other.yaml", machine=self.MACHINE)
        assert settings(tmp_path, "other.yaml")["model"] == "Qwen/Qwen3-0.6B"

    def test_models_that_cannot_be_served_are_left_out(
        self, init: Init, tmp_path: Path, cache: Path
    ) -> None:
        cache_model(cache, "a/no-weights", weights=0)
        cache_model(cache, "b/embeds", {**LLAMA, "architectures": ["BertModel"]})
        cache_model(cache, "c/broken", ["not", "an", "object"])
        cache_model(cache, "d/odd", {**LLAMA, "architectures": "LlamaForCausalLM"})
        (cache / "models--e--empty").mkdir()
        ended = init("--json", machine=self.MACHINE)
        assert json.loads(ended.stdout)["data"]["cached_models"] == []
        assert settings(tmp_path)["model"] == "Qwen/Qwen3-0.6B"

    def test_cpus_serve_the_tiny_model(self, init: Init, tmp_path: Path, cache: Path) -> None:
        cache_model(cache, "big/llama")
        init()
        assert settings(tmp_path)["model"] == "tiny"


class TestTheFile:
    def test_init_never_overwrites_a_file(self, init: Init, tmp_path: Path) -> None:
        (tmp_path / "deploy.yaml").write_text("name: mine\n")
        ended = init()
        assert (ended.code, ended.stdout) == (2, "")
        assert "deploy.yaml exists, and init never overwrites a file" in ended.stderr
        assert "try: deploy init -f deploy.new.yaml" in ended.stderr
        assert (tmp_path / "deploy.yaml").read_text() == "name: mine\n"

    def test_init_does_not_follow_a_dangling_link(self, init: Init, tmp_path: Path) -> None:
        (tmp_path / "deploy.yaml").symlink_to(tmp_path / "elsewhere")
        assert init().code == 2
        assert not (tmp_path / "elsewhere").exists()

    def test_init_writes_the_given_name(self, init: Init, tmp_path: Path) -> None:
        ended = init("-f", "two words.yaml")
        assert "deploy up -f 'two words.yaml'" in ended.stdout
        assert settings(tmp_path, "two words.yaml")["vendor"] == "cpu"
        assert not (tmp_path / "deploy.yaml").exists()

    def test_a_missing_folder_is_an_error(self, init: Init) -> None:
        ended = init("-f", "none/deploy.yaml")
        assert ended.code == 2
        assert "-f none/deploy.yaml: cannot be written (No such file or directory)" in ended.stderr
