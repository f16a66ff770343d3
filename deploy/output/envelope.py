"""The one JSON object that `--json` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deploy import __version__
from deploy.errors import PdkitError


def envelope(
    command: str,
    *,
    exit_code: int,
    data: Any = None,
    errors: Sequence[PdkitError] = (),
    indent: int | None = 2,
) -> str:
    """Return the envelope: version, command, status, exit code, data, errors.

    Without an indent it is one line, for a stream of them.
    """
    document = {
        "version": __version__,
        "command": command,
        "status": "ok" if exit_code == 0 else "error",
        "exit_code": exit_code,
        "data": data,
        "errors": [error.as_dict() for error in errors],
    }
    return json.dumps(document, indent=indent, ensure_ascii=False, default=str)
