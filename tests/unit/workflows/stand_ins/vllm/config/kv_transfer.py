"""Where the real one has the plug-in point for connectors; it is read, never imported."""


class KVTransferConfig:
    kv_connector_module_path: str | None = None
