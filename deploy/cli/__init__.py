"""The command line: options in, workflows called, one place that prints and exits."""

import gc

# Start-up allocates what stays: more than 50,000 objects in `plan`. Looking for cycles in them
# took a fourteenth of its CPU.
gc.set_threshold(150_000, 20, 20)
