"""The files of a Compose project: its document, and what its containers see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from deploy.runtime.home import StackHome, write_private
from deploy.runtime.secrets import Secret, fill_in
from deploy.stack.compose import compose_document, secrets_used
from deploy.stack.containers import call_filters
from deploy.stack.document import document_yaml
from deploy.stack.service import Service, Stack

COMPOSE_FILE = "compose.yaml"


def write_project(
    stack: Stack, home: StackHome, secrets: Mapping[str, Secret], *, stop_s: float
) -> list[Path]:
    """Write a stack's Compose file and all files that its containers see; return their paths."""
    document = compose_document(
        stack, root=str(home.root), secrets_dir=str(home.secrets_dir), stop_s=stop_s
    )
    texts = {COMPOSE_FILE: document_yaml(document), **call_filters(stack)}
    for name, text in texts.items():
        write_private(home.root / name, text)
    written = [home.root / name for name in texts]
    control = home.drain_file.parent  # mounted into the router's container, whose user reads it
    control.mkdir(parents=True, exist_ok=True, mode=0o700)
    control.chmod(0o755)
    for service in stack.services:
        if service.socket:
            folder = Path(service.socket).parent
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            _hand_over(folder, service)
        for file in service.files:
            write_private(Path(file.path), fill_in(file.text, secrets))
            _hand_over(Path(file.path), service)
            written.append(Path(file.path))
        for name in service.container.secrets if service.container else ():
            _hand_over(home.secrets_dir / name, service)
    return [*written, *(home.secrets_dir / name for name in secrets_used(stack))]


def _hand_over(file: Path, service: Service) -> None:
    """Let only the container's user use a file; only root can give it away."""
    if os.getuid() == 0 and service.container:
        uid, _, gid = service.container.user.partition(":")
        os.chown(file, int(uid), int(gid or uid))
