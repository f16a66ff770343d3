"""Where prompts that begin alike went: engines that share no KV each keep what they computed."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pdkit_router.engines import Engine, Group

_BLOCK_BYTES = 256
_BLOCKS = 256  # of a prompt; the rest does not matter for where it goes
_KNOWN = 2**17  # blocks that are remembered, of whatever prompts
# An engine may have this many requests more than the idlest one before others get its prompts.
_AHEAD = 8


class PrefixGroup(Group):
    """A group that sends a prompt to the engine that served the longest beginning of it."""

    def __init__(self, engines: Collection[Engine]) -> None:
        super().__init__(tuple(engines))
        self._served = OrderedDict[bytes, Engine]()

    def beginning(self, prompt: Any) -> Sequence[bytes]:
        """Return a name for each block of a prompt's beginning."""
        return tuple(_blocks(prompt))

    def choose(self, without: Collection[Engine], beginning: Sequence[bytes] = ()) -> Engine | None:
        """Return the engine that served the longest beginning, unless it is much busier."""
        idlest = super().choose(without)
        if idlest is None:
            return None
        known = (self._served.get(block) for block in reversed(beginning))
        holder = next((engine for engine in known if engine is not None), idlest)
        fits = holder not in without and holder.state == idlest.state and not holder.drained
        chosen = holder if fits and holder.busy <= idlest.busy + _AHEAD else idlest
        self._note(beginning, chosen)
        return chosen

    def _note(self, blocks: Sequence[bytes], engine: Engine) -> None:
        for block in blocks:
            self._served[block] = engine
            self._served.move_to_end(block)
        while len(self._served) > _KNOWN:
            self._served.popitem(last=False)


def _blocks(prompt: Any) -> Iterator[bytes]:
    """Yield a name for each whole block of a prompt's beginning; it stands for all before it, too.

    `prompt` is text, token ids or messages.
    """
    end = _BLOCKS * _BLOCK_BYTES
    if isinstance(prompt, list):
        # Each entry takes a byte at least. Without the closing bracket, what is added later only
        # adds to the text.
        prompt = json.dumps(prompt[:end])[:-1]
    if not isinstance(prompt, str):
        return
    text = prompt[:end].encode("utf-8", "surrogatepass")[:end]
    digest = hashlib.blake2b(digest_size=16)
    for at in range(0, len(text) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        digest.update(text[at : at + _BLOCK_BYTES])
        yield digest.digest()
