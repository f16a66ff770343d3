"""The systemd unit that starts a stack at boot: its text, and how it is turned on and off."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.errors import ConfigError, MachineError
from deploy.home_folder import expanded
from deploy.runtime.home import Home

_RUNS = Path("/run/systemd/system")
_LINGER = Path("/var/lib/systemd/linger")
# The variables that the command reads; none holds a secret.
_KEPT = ("PATH", "PDKIT_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "HF_HOME", "LD_LIBRARY_PATH")
_RETRY_S = 30


def require_systemd() -> None:
    """Check that systemd manages this machine.

    Raises:
        MachineError: it does not.
    """
    if not _RUNS.is_dir():
        raise MachineError(
            "--on-boot: systemd does not manage this machine",
            hint="let your init system run at boot: deploy up --resume",
        )


def unit_file(home: Home, name: str) -> Path:
    """Return the path of a stack's unit; another home's stack of the same name has another."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or expanded("~/.config"))
    digest = hashlib.sha256(str(home.stack(name).root).encode()).hexdigest()[:8]
    return config / "systemd" / "user" / f"pdkit-{name}-{digest}.service"


def write_unit(home: Home, name: str) -> Path:
    """Write a stack's unit, enabled, and return its path."""
    file = unit_file(home, name)
    argv = (sys.executable, "-m", "deploy", "up", "--resume", "--no-check", "--name", name)
    environ = {key: os.environ[key] for key in _KEPT if os.environ.get(key)}
    link = _link(file)
    link.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(boot_unit(name, argv, environ), encoding="utf-8")
    link.unlink(missing_ok=True)
    link.symlink_to(file)
    return file


def remove_unit(home: Home, name: str) -> None:
    """Remove a stack's unit, if it has one."""
    try:
        file = unit_file(home, name)
    except ConfigError:
        return  # without a home folder, no unit was ever written
    _link(file).unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def starts_without_login() -> bool:
    """Tell whether systemd starts this user's units at boot, rather than at the first login."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # for example, a user of a container
        return False
    return (_LINGER / user).exists()


def _link(file: Path) -> Path:
    return file.parent / "default.target.wants" / file.name


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
