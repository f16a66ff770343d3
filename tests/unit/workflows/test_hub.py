"""A hub model that is not here yet: planned for by what the hub says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.config.model import Model
from deploy.config.spec import StackSpec
from deploy.errors import ModelChanged
from deploy.runtime.home import Home
from deploy.stack.kv_identity import hash_seed
from deploy.workflows import up
from deploy.workflows.facts import stated_facts
from deploy.workflows.hub import described_model
from deploy.workflows.model_files import require_same_model
from deploy.workflows.prepare import Prepared, find_model, prepare
from tests.unit.conftest import KIT, MACHINE
from tests.unit.hub_stand_in import COMMIT, LLAMA, Hub

Make = Callable[..., StackSpec]
A_TOKEN = 2 * 80 * 8 * 128 * 2


class Asked:
    """Asks for a model, and keeps what is reported of it."""

    def __init__(self, spec: Make, home: Home) -> None:
        self._spec, self._home = spec, home
        self.lines: list[str] = []

    def __call__(self, **fields: object) -> Model | None:
        asked = self._spec(**{"model": "owner/70b", **fields})
        return described_model(asked, self._home, "cpu", self.lines.append)


@pytest.fixture
def ask(spec: Make, tmp_path: Path) -> Asked:
    return Asked(spec, Home(tmp_path, tmp_path))


def cached(folder: Path, commit: str = COMMIT) -> None:
    snapshot = folder / "cache" / "models--owner--70b" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))


def test_shape_and_commit_are_read_from_the_hub(hub: Hub, ask: Asked) -> None:
    model = ask()
    assert model is not None and model.shape is not None
    assert (model.ref, model.source, model.version) == ("owner/70b", "hub", COMMIT)
    assert model.shape.kv_bytes_per_token(2) == A_TOKEN
    assert model.weight_bytes is None
    assert ask.lines == [
        f"config.json of owner/70b fetched from {hub.address}: size of its weights unknown "
        f"({hub.address} lists no files of owner/70b)"
    ]


def test_the_model_is_the_same_after_its_download(
    ask: Asked, hub: Hub, tmp_path: Path, spec: Make
) -> None:
    before = ask()
    cached(tmp_path)
    after = find_model(spec(model="owner/70b"), Home(tmp_path, tmp_path), "cpu")
    assert before == after
    hub.asked.clear()
    assert ask() is None
    assert hub.asked == [], "what is here needs no hub"


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", ["tiny", "Qwen/Qwen3-0.6B"])
def test_known_models_are_not_asked_for(hub: Hub, ask: Asked, model: str) -> None:
    assert ask(model=model) is None
    assert (hub.asked, ask.lines) == ([], [])


def test_the_users_token_is_sent_and_not_shown(
    hub: Hub, ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    ask()
    assert hub.asked[0][1] == "Bearer hf_x"
    assert "hf_x" not in " ".join(ask.lines)


@pytest.mark.parametrize("args", [["--revision", "v2"], ["--seed", "1", "--revision=v2"]])
def test_the_users_revision_is_asked_for(hub: Hub, ask: Asked, args: list[str]) -> None:
    ask(engine={"args": args})
    assert hub.asked[0][0] == "/owner/70b/resolve/v2/config.json"


def test_the_engines_own_hub_is_asked(
    hub: Hub, ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert ask(engine={"env": {"HF_ENDPOINT": hub.address}}) is not None


def test_the_hub_is_not_asked_offline(
    hub: Hub, ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ask() is None
    assert hub.asked == []
    assert "HF_HUB_OFFLINE is set" in ask.lines[0]


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"{}"), (200, b"<html>"), (200, b'{"num_hidden_layers": "many"}')]
)
def test_a_hub_that_fails_stops_nothing(hub: Hub, ask: Asked, status: int, body: bytes) -> None:
    hub.status = status
    hub.body = body.replace(b"}", b', "num_attention_heads": 8, "hidden_size": 8}') if (
        b"many" in body
    ) else body  # fmt: skip
    assert ask() is None
    (line,) = ask.lines
    assert "owner/70b could not be fetched" in line
    assert "unknown" in line


class TestInPlans:
    @pytest.mark.usefixtures("hub")
    def test_redis_holds_what_the_model_needs_and_engines_that_commit(
        self, planned: Callable[..., Prepared]
    ) -> None:
        made = planned(engine={"kv_cache_gib": 4})
        assert made.plan.kv_bytes_per_token == A_TOKEN
        assert made.plan.redis_memory_mib == 8180, "twice the 13,088 tokens of whole blocks"
        assert made.notes == ()
        for engine in ("producer-0", "consumer-0"):
            argv = made.stack.service(engine).argv
            assert argv[argv.index("--revision") + 1] == COMMIT

    def test_the_same_before_and_after_the_download(
        self, hub: Hub, planned: Callable[..., Prepared], tmp_path: Path
    ) -> None:
        before = planned().stack.fingerprint()
        cached(tmp_path)
        assert planned().stack.fingerprint() == before
        assert len(hub.asked) == 2, "config.json and the list of files"

    def test_a_plan_without_it_says_so(self, hub: Hub, planned: Callable[..., Prepared]) -> None:
        hub.status = 500
        made = planned()
        assert made.plan.redis_memory_mib == MACHINE.memory_mib // 4
        assert any("KV size and context are unknown" in note for note in made.notes)


BRANCH_COMMIT = "f" * 40


def refer(folder: Path, branch: str, commit: str) -> None:
    """Write which commit of the cached model a branch means."""
    ref = folder / "cache" / "models--owner--70b" / "refs" / branch
    ref.parent.mkdir(exist_ok=True)
    ref.write_text(commit)


AT_V2 = {"args": ["--revision", "v2"]}


class TestTheUsersRevision:
    """A branch may move: engines of one plan are all held to the commit that it meant."""

    @pytest.mark.usefixtures("hub")
    def test_engines_get_its_commit_last(
        self, planned: Callable[..., Prepared], tmp_path: Path
    ) -> None:
        cached(tmp_path)  # main, which is another
        cached(tmp_path, BRANCH_COMMIT)
        refer(tmp_path, "main", COMMIT)
        refer(tmp_path, "v2", BRANCH_COMMIT)
        made = planned(engine=AT_V2)
        assert made.model.version == BRANCH_COMMIT
        for engine in ("producer-0", "consumer-0"):
            assert made.stack.service(engine).argv[-4:] == (
                "--revision", "v2", "--revision", BRANCH_COMMIT,
            )  # fmt: skip

    def test_a_cached_main_is_not_taken_for_it(self, ask: Asked, hub: Hub, tmp_path: Path) -> None:
        cached(tmp_path)
        refer(tmp_path, "main", COMMIT)
        assert ask(engine=AT_V2) is not None
        assert hub.asked[0][0] == "/owner/70b/resolve/v2/config.json"

    @pytest.mark.usefixtures("hub")
    def test_a_commit_needs_no_branch(
        self, planned: Callable[..., Prepared], tmp_path: Path
    ) -> None:
        cached(tmp_path, BRANCH_COMMIT)
        made = planned(engine={"args": [f"--revision={BRANCH_COMMIT}"]})
        assert made.model.version == BRANCH_COMMIT


def test_a_download_makes_no_other_stack_of_a_running_one() -> None:
    """Whatever was known first: the commit by the hub, or nothing at all."""
    planned, unknown = (Model("o/n", "o/n", "hub", None, None, text) for text in (COMMIT, ""))
    assert not up._other_files(planned, planned)
    assert not up._other_files(unknown, planned)
    assert not up._other_files(planned, unknown)
    assert up._other_files(Model("o/n", "o/n", "hub", None, None, "f" * 40), planned)


WEIGHTS = "model.safetensors"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A model as the hub's client caches it: links to blobs, by the commit of a branch."""
    folder = tmp_path / "hub" / "models--owner--70b"
    made = folder / "snapshots" / COMMIT
    for part in (made, folder / "blobs", folder / "refs"):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for name, text in (("config.json", json.dumps(LLAMA)), (WEIGHTS, "weights")):
        (folder / "blobs" / name).write_text(text)
        (made / name).symlink_to(folder / "blobs" / name)
    return made


def edit_blob(snapshot: Path) -> None:
    (snapshot / WEIGHTS).resolve().write_text("WEIGHTS")


def replace_link(snapshot: Path) -> None:
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).write_text("WEIGHTS")


@pytest.fixture
def offline(spec: Make, snapshot: Path, tmp_path: Path) -> Callable[[], Prepared]:
    def make() -> Prepared:
        env = {"HF_HUB_OFFLINE": "1"}
        asked = spec(model="owner/70b", hub_cache=tmp_path / "hub", engine={"env": env})
        facts = stated_facts(asked, MACHINE, runtime="process")
        return prepare(asked, Home(tmp_path, tmp_path), facts, kit=KIT)

    assert snapshot.is_dir()
    return make


@pytest.mark.parametrize("change", [edit_blob, replace_link])
def test_a_cached_model_that_was_edited_is_refused_and_has_other_keys(
    offline: Callable[[], Prepared], snapshot: Path, change: Callable[[Path], None]
) -> None:
    was = offline()
    require_same_model(was)
    assert hash_seed(offline().plan, was.layout) == hash_seed(was.plan, was.layout)
    change(snapshot)
    with pytest.raises(ModelChanged, match=rf"owner/70b have changed .*{WEIGHTS} was replaced"):
        require_same_model(was)
    assert hash_seed(offline().plan, was.layout) != hash_seed(was.plan, was.layout)


def test_a_model_that_the_hub_may_add_files_to_is_held_to_its_commit(
    spec: Make, snapshot: Path, tmp_path: Path
) -> None:
    asked = spec(model="owner/70b", hub_cache=tmp_path / "hub")
    home = Home(tmp_path, tmp_path)
    assert find_model(asked, home, "cpu", runtime="process").files == ()
    theirs = spec(
        model="owner/70b", hub_cache=tmp_path / "hub",
        engine={"env": {"HF_HUB_OFFLINE": "1", "HF_HOME": "/in/a/container"}},
    )  # fmt: skip
    assert find_model(theirs, home, "cpu", runtime="process").files == ()
    assert snapshot.is_dir()
