"""Secrets that would be seen by every user of Docker, or in a document."""

from __future__ import annotations

import re

from deploy.config.spec import StackSpec
from deploy.errors import ConfigError

# Variables of these names hold secrets, and `docker inspect` shows a container's variables.
_SECRET_NAME = re.compile(
    r"TOKEN(?!S|IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|(?<![A-Z])PASS(?![A-Z])"
    r"|(?:ACCESS|PRIVATE|SIGNING|ENCRYPTION|OPENAI|ANTHROPIC|SSH|GPG)_?KEY"
    r"|(?<=_)(?:KEY|PWD|AUTH|PAT|CREDS?)$|(?<![A-Z])JWT(?![A-Z])",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"://[^\s/?#]*:[^\s/?#]+@")


def is_secret(name: str, value: str) -> bool:
    """Tell whether a variable is likely to hold a secret, by its name or as a URL's password."""
    return bool(_SECRET_NAME.search(name) or _PASSWORD_IN_URL.search(value))


def refuse_visible_secrets(spec: StackSpec, otherwise: str = "--runtime process") -> None:
    """Refuse secrets among the engines' variables, which every user of Docker could read.

    Args:
        otherwise: what to do about one that is no token of the hub.

    Raises:
        ConfigError: naming the variable.
    """
    for name in (name for name, value in spec.engine.env.items() if is_secret(name, value)):
        raise ConfigError(
            f"{name} looks like a secret, and docker inspect and kubectl describe show a "
            "container's variables",
            setting="engine.env",
            hint="for a Hugging Face token: hf_token_file in deploy.yaml; else: " + otherwise,
        )
