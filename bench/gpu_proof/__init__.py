"""Test the kit on a machine with GPUs, step by step; `scripts/gpu-proof` runs it."""
