"""The real GPU code of vLLM and LMCache, run without a GPU."""
