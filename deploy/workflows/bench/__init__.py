"""`deploy bench`: load on a running stack, measured by client and engines."""

from deploy.workflows.bench.folder import open_folder
from deploy.workflows.bench.run import BenchOptions, bench_stack

__all__ = ["BenchOptions", "bench_stack", "open_folder"]
