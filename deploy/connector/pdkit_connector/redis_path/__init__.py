"""The Redis path: the kit's storage plug-ins for LMCache, which move KV to and from Redis.

A chunk's way: LMCache calls `backend` (inside an engine) or `second_tier` (in LMCache's server);
`transfer` looks up, loads and stores values over the connections, threads and health in `pool`;
`servers` finds and logs in to the server of a key; `protocol` speaks Redis' protocol on one
connection; `value` is the format of a value. `settings` reads the configuration, and `info` is what
engines report about Redis. Only `backend` and `second_tier` use LMCache.
"""
