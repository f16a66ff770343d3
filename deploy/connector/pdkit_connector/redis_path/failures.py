"""Why the plug-in could not be made: LMCache only logs it, and goes on without a store."""

from __future__ import annotations

failures: list[str] = []
