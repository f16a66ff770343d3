"""Deploy disaggregated prefill/decode vLLM with KV reuse through LMCache and Redis."""

__version__ = "0.1.0"
