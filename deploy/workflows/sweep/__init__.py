"""`deploy bench sweep`: every topology in turn, and which of them is best here."""

from deploy.workflows.sweep.live import LiveStacks
from deploy.workflows.sweep.run import left_seconds, run_sweep, write_best
from deploy.workflows.sweep.start import (
    Planned,
    Settings,
    open_sweep,
    plan_sweep,
    stack_name,
    sweep_port,
)

__all__ = [
    "LiveStacks",
    "Planned",
    "Settings",
    "left_seconds",
    "open_sweep",
    "plan_sweep",
    "run_sweep",
    "stack_name",
    "sweep_port",
    "write_best",
]
