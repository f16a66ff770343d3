"""How reliably `deploy check` notices wrong KV: seeded damage to what a real stack stores."""
