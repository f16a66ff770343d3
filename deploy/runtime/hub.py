"""The hub of models: a model's config.json and its size, before the rest is fetched."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.config.weight_files import chosen_weights, indexed_in

_TIMEOUT_S = 10.0
_HUB = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REFUSALS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class HubError(Exception):
    """The hub gave no usable answer; the text says why.

    Attributes:
        refused: it does not give the model to this user.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True)
class HubConfig:
    """A model's config.json, and the commit that it is of; "" if the hub does not say."""

    config: Mapping[str, Any]
    commit: str


def hub_address(environ: Mapping[str, str]) -> str:
    """Return where the hub is, as its own client finds it."""
    return (environ.get("HF_ENDPOINT") or _HUB).rstrip("/")


def fetch_config(address: str, model: str, revision: str, token: str | None) -> HubConfig:
    """Fetch the config.json of a model.

    Raises:
        HubError: the hub does not answer, or not with that file.
    """
    answer = _get(address, f"{model}/resolve/{revision}/config.json", token)
    # Where the hub points at a copy elsewhere, it is the hub that names the commit.
    commits = (one.headers.get("x-repo-commit", "") for one in (*answer.history, answer))
    commit = next((text for text in commits if _COMMIT.fullmatch(text)), "")
    return HubConfig(_json_object(address, answer), commit)


def fetch_weight_bytes(
    address: str, model: str, revision: str, token: str | None, load_format: str = "auto"
) -> int:
    """Return the size of the weight files that engines would load.

    Raises:
        HubError: the hub does not answer, or lists no such files with their sizes.
    """

    def read_index(name: str) -> Collection[str]:
        found = _get(address, f"{model}/resolve/{revision}/{name}", token)
        return indexed_in(found.content)

    answer = _get(address, f"api/models/{model}/revision/{revision}?blobs=true", token)
    try:
        listed = _json_object(address, answer)["siblings"]
        sizes = {str(one["rfilename"]): one.get("size") for one in listed}
    except (LookupError, TypeError, AttributeError) as exc:
        raise HubError(f"{address} lists no files of {model}") from exc
    chosen = chosen_weights(sizes, read_index, load_format)
    of_files = [sizes[name] for name in chosen.files]
    if not of_files or chosen.missing or not all(type(size) is int for size in of_files):
        raise HubError(f"{address} gives no sizes of {model}'s weights")
    return sum(of_files)


def _get(address: str, path: str, token: str | None) -> httpx.Response:
    # httpx sends the token to no other host that this one may point at.
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{address}/{path}", headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
        )
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as exc:
        raise HubError(f"{address} does not answer, {type(exc).__name__}") from exc
    if answer.status_code != httpx.codes.OK:
        said = f"{address} answers {answer.status_code} {answer.reason_phrase}".rstrip()
        raise HubError(said, refused=answer.status_code in _REFUSALS)
    return answer


def _json_object(address: str, answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError as exc:
        raise HubError(f"{address} did not answer with JSON") from exc
    if not isinstance(found, dict):
        raise HubError(f"{address} did not answer with a JSON object")
    return found
