"""B3: LMCache's server reads the key of a single layer out of a client's message."""

from __future__ import annotations

import torch
from lmcache.utils import LayerCacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import ClientCommand, ClientMetaMessage
from lmcache_objects import key


def cell() -> None:
    for tags in (None, {"lmcache.tag.tenant": "7"}):
        whole = key(0xABC, request_configs=tags)
        assert heard(whole) == whole
        for layer_key in whole.split_layers(12):
            read = heard(layer_key)
            assert type(read) is LayerCacheEngineKey, f"{layer_key.to_string()} read as {read}"
            assert read == layer_key


def heard(of: object) -> object:
    """Return the key that the server takes from a client's request for `of`."""
    shape = torch.Size((4, 2, 16, 1))
    sent = ClientMetaMessage(ClientCommand.GET, of, 9, MemoryFormat.KV_2LTD, torch.half, shape)
    return ClientMetaMessage.deserialize(sent.serialize()).key
