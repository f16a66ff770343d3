"""Why the plug-in could not be created. LMCache only logs this, and continues without a store."""

from __future__ import annotations

failures: list[str] = []
