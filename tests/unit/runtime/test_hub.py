"""A model's config.json, asked of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from deploy.connector.pdkit_connector.identity.model_files import is_offline
from deploy.runtime.hub import HubError, fetch_config, fetch_weight_bytes, hub_address
from tests.unit.hub_stand_in import COMMIT, LLAMA, Hub, open_hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with open_hub() as made:
        yield made


def test_a_config_is_fetched_with_its_commit(hub: Hub) -> None:
    found = fetch_config(hub.address, "owner/name", "main", None)
    assert (found.config, found.commit) == (LLAMA, COMMIT)
    assert hub.asked == [("/owner/name/resolve/main/config.json", None)]


def test_token_and_revision_are_sent(hub: Hub) -> None:
    fetch_config(hub.address, "owner/name", "v2", "hf_x")
    assert hub.asked == [("/owner/name/resolve/v2/config.json", "Bearer hf_x")]


def test_the_commit_is_read_before_a_redirect(hub: Hub) -> None:
    hub.status = 307
    hub.headers["Location"] = "/elsewhere/config.json"
    found = fetch_config(hub.address, "owner/name", "main", None)
    assert (found.config, found.commit) == (LLAMA, COMMIT)


@pytest.mark.parametrize("commit", ["", "main", "--x", COMMIT + "\t0"])
def test_an_invalid_commit_is_ignored(hub: Hub, commit: str) -> None:
    """It would become an argument of the engines."""
    hub.headers["X-Repo-Commit"] = commit
    assert fetch_config(hub.address, "owner/name", "main", None).commit == ""


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [(404, b"", "404"), (401, b"", "401"), (200, b"<html>", "JSON"), (200, b"[1]", "JSON object")],
)
def test_an_unexpected_answer_is_an_error(hub: Hub, status: int, body: bytes, words: str) -> None:
    hub.status, hub.body = status, body
    with pytest.raises(HubError, match=words):
        fetch_config(hub.address, "owner/name", "main", None)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "no address", "http://[::"])
def test_a_hub_that_does_not_answer_is_an_error(address: str) -> None:
    with pytest.raises(HubError, match="does not answer"):
        fetch_config(address, "owner/name", "main", None)


def test_the_hubs_variables_are_used() -> None:
    assert hub_address({}) == "https://huggingface.co"
    assert hub_address({"HF_ENDPOINT": "http://mirror/"}) == "http://mirror"
    assert [is_offline({"HF_HUB_OFFLINE": text}) for text in ("1", "true", "0", "")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert not is_offline({})


SHARDS = {f"model-0000{n}-of-00002.safetensors": b"s" * n for n in (1, 2)}
INDEX = {
    "model.safetensors.index.json": json.dumps({"weight_map": dict(enumerate(SHARDS))}).encode()
}
MISTRAL = {"consolidated.safetensors": b"c" * 10}
PICKLES = {"pytorch_model.bin": b"p" * 100}


@pytest.mark.parametrize(
    ("files", "load_format", "size"),
    [
        ({**SHARDS, **INDEX}, "auto", 3),
        ({**SHARDS, **INDEX, "stray.safetensors": b"x", **PICKLES}, "auto", 3),
        ({**SHARDS, **INDEX, **MISTRAL}, "auto", 10),
        ({**SHARDS, **INDEX, **MISTRAL}, "hf", 3),
        (PICKLES, "auto", 100),
    ],
    ids=["shards", "twice", "Mistral's", "Mistral's as shards", "pickles"],
)
def test_the_size_is_that_of_the_files_which_engines_load(
    hub: Hub, files: dict[str, bytes], load_format: str, size: int
) -> None:
    hub.files = files
    assert fetch_weight_bytes(hub.address, "owner/name", "v2", "hf_x", load_format) == size
    assert hub.asked[0] == ("/api/models/owner/name/revision/v2?blobs=true", "Bearer hf_x")


def test_sizes_that_the_hub_does_not_give_are_an_error(hub: Hub) -> None:
    hub.files = {**SHARDS, **INDEX}
    del hub.files["model-00001-of-00002.safetensors"]
    with pytest.raises(HubError, match="no sizes"):
        fetch_weight_bytes(hub.address, "owner/name", "main", None)
    hub.files = {}
    for body in (b"{}", b'{"siblings": [1]}', b'{"siblings": [{"rfilename": "a.safetensors"}]}'):
        hub.body = body
        with pytest.raises(HubError, match=r"no files|no sizes"):
            fetch_weight_bytes(hub.address, "owner/name", "main", None)
