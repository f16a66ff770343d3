"""vLLM's LMCache connector with the known bugs of the installed LMCache fixed at start.

Stands alone: it is the only part of the kit that enters an engine's process, so it imports
nothing of `deploy`, and torch, vLLM and LMCache only inside the functions that use them.
"""
