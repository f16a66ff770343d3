"""Which environment variables hold a secret."""

from __future__ import annotations

import re

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
