"""`deploy render`: a stack as one document."""

from __future__ import annotations

from typing import Any

from deploy.runtime.home import Home
from deploy.stack.document import stack_document
from deploy.workflows.prepare import Prepared


def rendered(prepared: Prepared, home: Home) -> dict[str, Any]:
    """Return the document of a stack: for Compose, or of processes. Reads and writes nothing."""
    if prepared.plan.runtime == "process":
        return stack_document(prepared.stack)
    from deploy.stack.compose import compose_document

    files = home.stack(prepared.stack.name)
    return compose_document(
        prepared.stack,
        root=str(files.root),
        secrets_dir=str(files.secrets_dir),
        stop_s=prepared.spec.timeouts.stop_s,
    )
