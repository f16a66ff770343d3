"""The router: the one door to a stack. Imports nothing of the rest of the kit."""
