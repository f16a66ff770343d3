"""Where the real one has the plug-in point for stores; it is read, never imported."""

_CONFIG_DEFINITIONS: dict[str, dict[str, object]] = {"storage_plugins": {}}
