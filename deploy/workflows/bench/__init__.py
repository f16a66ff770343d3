"""`deploy bench`: load on a running stack, measured by client and engines."""

from deploy.workflows.bench.passes import BenchOptions
from deploy.workflows.bench.run import bench_stack, open_folder

__all__ = ["BenchOptions", "bench_stack", "open_folder"]
