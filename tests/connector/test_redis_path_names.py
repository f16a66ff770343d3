"""Names of keys: the same as LMCache spells them, one by one or a prompt at once."""

from __future__ import annotations

import pytest
import torch
from lmcache.utils import CacheEngineKey
from pdkit_connector.redis_path.backend import Names

PREFIX = "pdkit:x:ab:"


def key(number, model="a/model", rank=1, dtype=torch.bfloat16, **tags):
    configs = {f"lmcache.tag.{name}": value for name, value in tags.items()} or None
    return CacheEngineKey(model, 2, rank, number, dtype, configs)


PROMPT = [key(n * 0x9E3779B97F4A7C15 % (1 << 63)) for n in range(5)]


@pytest.mark.parametrize(
    "keys",
    [
        [],
        PROMPT[:1],
        PROMPT,
        [key(n, "a@7@model@1@7") for n in (1, 7, 11)],
        [key(n, "modèle") for n in (1, 2)],
        [key(n, who="check-1") for n in (1, 2, 3)],
        # Whatever else differs, in the first, the last or one between:
        [key(7, "other"), *PROMPT],
        [*PROMPT, key(7, rank=0)],
        [PROMPT[0], key(7, dtype=torch.float16), PROMPT[1]],
        [PROMPT[0], key(7, who="check-1"), PROMPT[1]],
        [PROMPT[0], *PROMPT[1].split_layers(2), PROMPT[2]],
        PROMPT[0].split_layers(3),
        # What cannot be compared or is no number.
        [key(n, who=["a"]) for n in (1, 2)],
        [key(b"\x01\x02"), key(b"\x03\x04")],
    ],
)
def test_keys_are_spelled_as_lmcache_spells_them(keys):
    spelled = [f"{PREFIX}{one.to_string()}".encode() for one in keys]
    names = Names(PREFIX, first_rank_only=False)
    assert names.many(keys) == spelled
    assert [names.one(one) for one in keys] == spelled


def test_the_keys_of_a_prompt_are_spelled_once(monkeypatch):
    spelled = []
    real = CacheEngineKey.to_string
    monkeypatch.setattr(
        CacheEngineKey, "to_string", lambda self: spelled.append(self) or real(self)
    )
    names = Names(PREFIX, first_rank_only=False)
    assert len(set(names.many([key(n) for n in range(1000)]))) == 1000
    assert len(spelled) <= 2


def test_all_ranks_of_an_mla_model_use_the_keys_of_the_first():
    names = Names(PREFIX, first_rank_only=True)
    of_first = [key(n, rank=0) for n in range(3)]
    of_second = [key(n, rank=1) for n in range(3)]
    assert names.many(of_second) == Names(PREFIX, first_rank_only=False).many(of_first)
    assert names.many([of_first[0], of_second[1]]) == names.many(of_first[:2])


def test_a_release_with_other_keys_spells_each_key(monkeypatch):
    monkeypatch.setattr("pdkit_connector.redis_path.backend._KNOWS_ALL", False)
    names = Names(PREFIX, first_rank_only=False)
    monkeypatch.setattr(CacheEngineKey, "to_string", lambda self: f"new{self.chunk_hash}")
    assert names.many([key(1), key(2)]) == [b"pdkit:x:ab:new1", b"pdkit:x:ab:new2"]
