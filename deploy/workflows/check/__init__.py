"""`deploy check`: test on the running stack that KV is reused, and that it is right."""

from deploy.workflows.check.run import (
    CheckOptions,
    check_running,
    check_stack,
    renew_store_connections,
    require_answers,
)

__all__ = [
    "CheckOptions",
    "check_running",
    "check_stack",
    "renew_store_connections",
    "require_answers",
]
