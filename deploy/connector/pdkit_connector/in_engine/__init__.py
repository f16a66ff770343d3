"""What only LMCache inside engines needs, beside `fixes`, `connector` and `redis_path.backend`.

Frozen: LMCache gives this mode up. It gets no new fix but for wrong KV; `server_connector`
replaces it.
"""
