"""What the commands do, step by step. Workflows report through a callback and never print."""
