"""Errors that stop an engine at start or refuse one transfer.

ConnectorError
├── FixFailed           a needed fix could not be applied
├── UnsupportedSetting  the fixes cannot serve this configuration
└── TransferRefused     bytes would land in the wrong place
"""

from __future__ import annotations


class ConnectorError(RuntimeError):
    """Stop the engine, or one transfer, with a message that says what to change."""


class FixFailed(ConnectorError):
    """A bug is present and its fix did not take."""


class UnsupportedSetting(ConnectorError):
    """The configuration asks for what a fix cannot do safely."""


class TransferRefused(ConnectorError):
    """A copy between vLLM's blocks and a memory object does not line up."""
