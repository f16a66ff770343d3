"""Names that settings choose from."""

from __future__ import annotations

from typing import Literal

RuntimeChoice = Literal["auto", "compose", "process"]
GpuAccess = Literal["auto", "runtime", "cdi", "all"]
# LMCache inside each engine, or LMCache's server.
Connector = Literal["lmcache", "lmcache-mp"]
IN_ENGINES: Connector = "lmcache"
MP: Connector = "lmcache-mp"
