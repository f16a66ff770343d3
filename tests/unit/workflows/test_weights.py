"""A hub's model is fetched before engines start: all of it, once, and from where it was cut off."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.config.spec import StackSpec
from deploy.errors import MissingModel, NotEnoughMemory
from deploy.planning.inventory import Gpu
from deploy.runtime.home import Home
from deploy.runtime.weights import WantedModel, give_to
from deploy.workflows.facts import stated_facts
from deploy.workflows.hub import described_model, fetch_weights
from deploy.workflows.prepare import Prepared, prepare
from tests.unit.conftest import KIT, MACHINE
from tests.unit.hub_stand_in import COMMIT, LLAMA, Hub

HOME = Home(Path("/nowhere"), Path("/nowhere"))
SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 100_000 for n in (1, 2)}
INDEX = {"weight_map": {f"layer.{n}": name for n, name in enumerate(SHARDS)}}
MODEL = {
    "config.json": json.dumps(LLAMA).encode(),
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    **SHARDS,
}
LEFT_OUT = {"pytorch_model.bin": b"the same once more"}


@pytest.fixture
def hub(hub: Hub) -> Hub:
    """Return the hub, with a whole model."""
    hub.files = {**MODEL, **LEFT_OUT}
    return hub


def snapshot(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--owner--70b" / "snapshots" / COMMIT


def test_files_that_engines_read_are_fetched_once(
    hub: Hub, planned: Callable[..., Prepared], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    made = planned()
    fetch_weights(made, HOME, said.append)
    assert said == [f"fetching owner/70b from {hub.address} into {tmp_path / 'cache'}"]
    found = {file.name: file.read_bytes() for file in snapshot(tmp_path).iterdir()}
    assert found == MODEL
    assert capsys.readouterr().out == "", "the bar is no answer"
    hub.asked.clear()
    fetch_weights(made, HOME, said.append)
    assert (hub.asked, len(said)) == ([], 1)


def test_engines_are_held_to_the_commit_that_was_downloaded(
    hub: Hub, planned: Callable[..., Prepared], tmp_path: Path
) -> None:
    """The hub did not name it when the stack was planned, and its branch may move later."""
    files, hub.files, hub.status = hub.files, {}, 500
    made = planned()
    assert made.model.version == ""
    hub.files = files
    held = fetch_weights(made, HOME, lambda _: None)
    assert held.model.version == held.plan.model.version == COMMIT == snapshot(tmp_path).name
    for engine in ("producer-0", "consumer-0"):
        argv = held.stack.service(engine).argv
        assert argv[argv.index("--revision") + 1] == COMMIT
    assert made.model.shape is None
    assert held.model.shape is not None, "planned again, with the files"
    assert held.model.weight_bytes == sum(map(len, SHARDS.values()))
    assert held.plan.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    seeds = {one.stack.service("consumer-0").env["PYTHONHASHSEED"] for one in (made, held)}
    assert len(seeds) == 2
    assert fetch_weights(held, HOME, lambda _: None) == held


CONSOLIDATED = {"consolidated.safetensors": b"Mistral's own format"}


@pytest.mark.parametrize(
    ("files", "fields", "weights"),
    [
        (CONSOLIDATED, {}, CONSOLIDATED),
        (CONSOLIDATED, {"engine": {"args": ["--load-format", "hf"]}}, SHARDS),
        (CONSOLIDATED, {"engine": {"args": ["--load_format=mistral"]}}, CONSOLIDATED),
        ({"stray.safetensors": b"in no index", "below/a.safetensors": b"neither"}, {}, SHARDS),
        ({"original/consolidated.00.pth": b"Meta's own format"}, {}, SHARDS),
        ({"model.onnx": b"x", "tf_model.h5": b"x", "model.gguf": b"x"}, {}, SHARDS),
    ],
    ids=["Mistral", "asked for shards", "asked for Mistral's", "stray", "Llama", "unread"],
)
def test_weights_in_several_formats_are_fetched_in_the_one_that_engines_load(
    hub: Hub,
    planned: Callable[..., Prepared],
    tmp_path: Path,
    files: dict[str, bytes],
    fields: dict[str, object],
    weights: dict[str, bytes],
) -> None:
    hub.files = {**hub.files, **files}
    made = planned(**fields)
    fetch_weights(made, HOME, lambda _: None)
    found = {
        str(file.relative_to(snapshot(tmp_path))): file.read_bytes()
        for file in snapshot(tmp_path).rglob("*")
        if file.is_file()
    }
    others = {name: content for name, content in MODEL.items() if name not in SHARDS}
    assert found == {**others, **weights}
    hub.asked.clear()
    fetch_weights(made, HOME, lambda _: None)
    assert hub.asked == [], "nothing is missing for these engines"


def test_pickles_are_fetched_where_there_is_nothing_else(
    hub: Hub, planned: Callable[..., Prepared], tmp_path: Path
) -> None:
    pickles = {"pytorch_model.bin": b"pickled", "config.json": MODEL["config.json"]}
    hub.files = {**pickles, "tf_model.h5": b"the same", "optimizer.pt": b"of a training"}
    fetch_weights(planned(), HOME, lambda _: None)
    assert {file.name for file in snapshot(tmp_path).iterdir()} == pickles.keys()


def test_a_download_that_was_cut_off_goes_on(
    hub: Hub, planned: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned()
    # The client tries again by itself, after a second each time.
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    first, second = SHARDS
    hub.cut = second
    with pytest.raises(MissingModel, match="owner/70b could not be downloaded") as caught:
        fetch_weights(made, HOME, lambda _: None)
    assert "resumes the download" in caught.value.hint
    assert not (snapshot(tmp_path) / second).exists()
    hub.cut = ""
    hub.asked.clear()
    fetch_weights(made, HOME, lambda _: None)
    asked = " ".join(path for path, _ in hub.asked)
    assert second in asked and first not in asked, "what came whole is not asked for again"
    assert all((snapshot(tmp_path) / name).read_bytes() == SHARDS[name] for name in SHARDS)


def test_a_partial_download_is_not_complete(tmp_path: Path) -> None:
    wanted = WantedModel("owner/70b", "main", tmp_path / "cache")
    assert not wanted.is_here()
    folder = snapshot(tmp_path)
    folder.mkdir(parents=True)
    refs = wanted.folder / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    for name, content in list(MODEL.items())[:-1]:
        (folder / name).write_bytes(content)
    assert not wanted.is_here()
    (folder / list(MODEL)[-1]).write_bytes(b"x")
    assert wanted.is_here()
    (folder / "model.safetensors.index.json").unlink()
    assert wanted.is_here(), "a single file has no index"


@pytest.mark.parametrize(
    "index", ["[" * 100_000, "[]", '{"weight_map": 5}'], ids=["levels", "list", "number"]
)
def test_an_invalid_index_is_not_complete(tmp_path: Path, index: str) -> None:
    wanted = WantedModel("owner/70b", snapshot(tmp_path).name, tmp_path / "cache")
    snapshot(tmp_path).mkdir(parents=True)
    (snapshot(tmp_path) / "model.safetensors.index.json").write_text(index)
    assert not wanted.is_here()


def test_the_users_token_is_sent_and_only_that(
    hub: Hub, planned: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    fetch_weights(planned(), HOME, lambda _: None)
    assert {token for _, token in hub.asked} == {"Bearer hf_x"}


@pytest.mark.parametrize(
    ("environ", "fields"),
    [
        ({"HF_HUB_OFFLINE": "1"}, {}),
        ({}, {"model": "tiny"}),
        ({}, {"engine": {"env": {"HF_HOME": "/elsewhere"}}}),
    ],
)
def test_files_that_engines_do_not_fetch_are_not_fetched(
    hub: Hub,
    planned: Callable[..., Prepared],
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    fields: dict[str, object],
) -> None:
    made = planned(**fields)
    hub.asked.clear()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    fetch_weights(made, HOME, lambda _: None)
    assert hub.asked == []


def test_files_are_given_to_the_containers_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = WantedModel("owner/70b", COMMIT, tmp_path / "cache")
    snapshot(tmp_path).mkdir(parents=True)
    (snapshot(tmp_path) / "config.json").symlink_to("../../blobs/gone")
    (tmp_path / "cache" / "models--another").mkdir()
    given: list[str] = []
    monkeypatch.setattr(
        "os.chown", lambda path, *who, **_: given.append(f"{Path(path).name} {who}")
    )
    give_to(wanted, 5, 6)
    names = ("models--owner--70b", "snapshots", COMMIT, "config.json")
    assert sorted(given) == sorted(f"{name} (5, 6)" for name in names)


TWO_GPUS = replace(MACHINE, gpus=tuple(Gpu(n, "cuda", "H100", 81559) for n in range(2)))


def test_a_model_that_does_not_fit_is_refused_before_anything_is_fetched(
    hub: Hub, spec: Callable[..., StackSpec], tmp_path: Path
) -> None:
    """A 70B model on one GPU of 80 GB for each engine: the hub says how large it is."""
    hub.sizes = dict.fromkeys(SHARDS, 70_550_000_000)
    asked = spec(model="owner/70b", vendor="cuda", hub_cache=tmp_path / "cache")
    said: list[str] = []
    model = described_model(asked, HOME, "cuda", said.append)
    assert said == [f"config.json of owner/70b fetched from {hub.address}: 141.1 GB of weights"]
    facts = stated_facts(asked, TWO_GPUS, runtime="process")
    with pytest.raises(NotEnoughMemory, match=r"has 131\.4 GiB of weights for each GPU"):
        prepare(asked, HOME, facts, model=model, kit=KIT)
    assert not (tmp_path / "cache").exists()
