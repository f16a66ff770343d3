"""The door in front of the router, which asks for a key. Imports nothing of the rest of the kit."""
