"""What the user asked for: the strict spec, where each value came from, vendors and models."""
