"""The systemd user unit that brings a stack of processes up again after a reboot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_RETRY_S = 30


def boot_unit(stack: str, argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the unit's text; `argv` brings the stack up as it was."""
    variables = [f"Environment={_quoted(f'{name}={text}')}" for name, text in environ.items()]
    lines = (
        "[Unit]",
        f"Description=pdkit stack {stack}",
        "",
        "[Service]",
        # The command ends when the stack serves; its services stay in the unit's control group.
        "Type=oneshot",
        "RemainAfterExit=yes",
        "TimeoutStartSec=infinity",
        "Restart=on-failure",
        f"RestartSec={_RETRY_S}",
        *variables,
        f"ExecStart={' '.join(_quoted(part).replace('$', '$$') for part in argv)}",
        "",
        "[Install]",
        "WantedBy=default.target",
    )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a word as systemd reads it back: one word, without specifiers, on one line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'
