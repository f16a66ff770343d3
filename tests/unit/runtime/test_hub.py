"""A model's config.json, asked of the hub."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.connector.pdkit_connector.identity.model_files import is_offline
from deploy.runtime.hub import HubError, fetch_config, hub_address
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
