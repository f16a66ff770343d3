"""Where the `docker` command finds Compose, which may be a plug-in of the user's own folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PATH = '{{range .ClientInfo.Plugins}}{{if eq .Name "compose"}}{{.Path}}{{end}}{{end}}'


def compose_plugin(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the plug-in's file, or None if there is no Compose or no `docker`.

    No engine is asked. `docker` tells its plug-ins before it complains about that.
    """
    command = ("docker", "info", "--format", _PATH)
    env = {**environ, "DOCKER_HOST": "unix:///nonexistent"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        return None
    return Path(done.stdout.strip()) if done.stdout.strip() else None
