"""The kit's own way between LMCache and Redis, loaded by LMCache's plug-in point for storage.

`backend` is what LMCache calls; `client` loads, stores and looks up values over several `link`s;
`value` says what a value is made of; `address` and `topology` find the server of a key; `counters`
count what happened. Only `backend` knows LMCache.
"""
