"""The command line: options in, workflows called, one place that prints and exits."""

import gc

# Start-up allocates what stays; looking for cycles in it took a tenth of the CPU of `plan`.
gc.set_threshold(50_000, 20, 20)
