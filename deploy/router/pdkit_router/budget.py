"""How often requests may be tried again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass
class Budget:
    """How often requests may be tried again, so that all who do so make no failure worse."""

    size: float = 256.0
    a_second: float = 16.0
    left: float = 256.0
    at: float = 0.0

    def take(self) -> bool:
        now = asyncio.get_running_loop().time()
        self.left = min(self.size, self.left + (now - self.at) * self.a_second)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True
