"""A generated tiny Llama, byte-identical everywhere, that shows when its KV is wrong."""

from __future__ import annotations

from deploy.tiny_model.model_folder import ensure_tiny_model, model_folder_name
from deploy.tiny_model.shape import config_json

__all__ = ["config_json", "ensure_tiny_model", "model_folder_name"]
