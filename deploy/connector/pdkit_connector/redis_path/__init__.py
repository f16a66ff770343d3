"""The Redis path: the kit's storage plug-in for LMCache, which moves KV to and from Redis.

`backend` is what LMCache calls; `client` loads, stores and looks up values over several `link`s;
`value` defines the format of a value; `address` and `routing_table` find the server of a key;
`counters` count what happened. Only `backend` uses LMCache.
"""
