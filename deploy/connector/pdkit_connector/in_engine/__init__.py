"""What only LMCache inside engines needs, beside `fixes`, `connector` and `redis_path.backend`.

Frozen: LMCache gives this mode up. It gets no new fix but for wrong KV; `mp_connector` replaces it.
"""
