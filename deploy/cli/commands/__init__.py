"""The commands, by what they are about; each imports what it needs when it runs."""

from deploy.cli.commands import (  # noqa: F401 - they join the application
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
    status,
    swap,
)
