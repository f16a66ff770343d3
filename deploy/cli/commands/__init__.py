"""The commands, by what they are about; each imports what it needs when it runs."""

from deploy.cli.commands import (
    bench,
    bench_compare,
    bench_sweep,
    check,
    doctor,
    export,
    images,
    init,
    patches,
    restart,
    stack,
    swap,
)

__all__ = [
    "bench",
    "bench_compare",
    "bench_sweep",
    "check",
    "doctor",
    "export",
    "images",
    "init",
    "patches",
    "restart",
    "stack",
    "swap",
]
