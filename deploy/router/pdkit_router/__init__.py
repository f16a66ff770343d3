"""The router, through which clients reach a stack. Imports nothing of the rest of the kit."""
