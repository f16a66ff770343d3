"""How fast KV moves between an engine and Redis: a socket, stock LMCache, and the kit's own way."""
