"""Starts the engine that stands in for vLLM."""

from vllm.entrypoints.openai.api_server import main

if __name__ == "__main__":
    main()
