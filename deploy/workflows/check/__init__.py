"""`deploy check`: test on the running stack that KV is reused, and that it is right."""

from deploy.workflows.check.answering import require_answers
from deploy.workflows.check.renewal import renew_store_connections
from deploy.workflows.check.run import CheckOptions, check_running, check_stack

__all__ = [
    "CheckOptions",
    "check_running",
    "check_stack",
    "renew_store_connections",
    "require_answers",
]
