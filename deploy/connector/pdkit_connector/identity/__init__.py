"""What KV depends on: the model files an engine loads, and what it runs."""
