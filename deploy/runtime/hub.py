"""The hub of models: a model's config.json, before an engine fetches the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_TIMEOUT_S = 10.0
_HUB = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REFUSALS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class HubError(Exception):
    """The hub gave no config.json; the text says why.

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
    # httpx sends the token to no other host that this one may point at.
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{address}/{model}/resolve/{revision}/config.json"
    try:
        answer = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as exc:
        raise HubError(f"{address} does not answer, {type(exc).__name__}") from exc
    if answer.status_code != httpx.codes.OK:
        said = f"{address} answers {answer.status_code} {answer.reason_phrase}".rstrip()
        raise HubError(said, refused=answer.status_code in _REFUSALS)
    try:
        config = answer.json()
    except ValueError as exc:
        raise HubError(f"{address} did not answer with JSON") from exc
    if not isinstance(config, dict):
        raise HubError(f"{address} did not answer with a JSON object")
    # Where the hub points at a copy elsewhere, it is the hub that names the commit.
    commits = (one.headers.get("x-repo-commit", "") for one in (*answer.history, answer))
    return HubConfig(config, next((text for text in commits if _COMMIT.fullmatch(text)), ""))
