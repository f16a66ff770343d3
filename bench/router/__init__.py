"""What the router adds to a request, beside vllm-router, with engines that answer at once."""
