"""Direct hand-off: the consumer reads the KV from the producer's own blocks.

The prefill's answer has `kv_transfer_params`, which name those blocks, and the decode is sent them
as they are. They hold for one read of one prompt: an engine that reads after the blocks were used
again, or for another prompt, computes a wrong answer and says nothing.
"""

from __future__ import annotations

import json
import logging

from pdkit_router.handoff import Fields, Unreadable
from pdkit_router.upstream import Exchange

_log = logging.getLogger("router")
PARAMS = "kv_transfer_params"
# Two million tokens, whose blocks are all named. A prefill's answer has one token beside them.
_LARGEST = 2**20


class DirectHandoff:
    """vLLM's `kv_transfer_params`, as NIXL's connectors read and write them."""

    name = "direct"
    pins = True
    reusable = False
    own_ids = True

    def asks(self, path: str, fields: Fields) -> Fields:
        """Ask for parameters, unless the engine would use them more than once, or wrongly."""
        if not _is_one_read(fields) or not _has_one_prompt(path, fields):
            return {}
        asked = {PARAMS: {"do_remote_decode": True, "do_remote_prefill": False}}
        # The answer would have the whole prompt in it.
        return {**asked, **({"return_token_ids": False} if "return_token_ids" in fields else {})}

    async def read(self, exchange: Exchange) -> Fields | None:
        """Return the answer's parameters."""
        answer = bytearray()

        def keep(piece: bytes) -> None:
            if len(answer) <= _LARGEST:
                answer.extend(piece)

        exchange.pass_to(keep)
        await exchange.ended
        if exchange.status != 200:
            return None
        if len(answer) > _LARGEST:
            raise _unreadable(f"is larger than {_LARGEST} bytes")
        if PARAMS.encode() not in answer:
            return None
        try:
            params = json.loads(answer).get(PARAMS)
        except (ValueError, AttributeError, RecursionError):
            raise _unreadable("is not a JSON object") from None
        if not isinstance(params, (dict, type(None))):
            raise _unreadable(f"has {PARAMS} that are not an object")
        return {PARAMS: params} if params else None


def _unreadable(why: str) -> Unreadable:
    _log.warning("the answer of a prefill %s: the KV is not handed over", why)
    return Unreadable()


def _is_one_read(fields: Fields) -> bool:
    """Tell whether a request makes the engine compute one sequence, from its first token."""
    if any(fields.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False  # each sequence would read the same blocks, which are free after the first
    if fields.get("use_beam_search") or fields.get("background"):
        return False
    # The engine computes the prompt for its log probabilities.
    return fields.get("prompt_logprobs") is None and not fields.get("echo")


def _has_one_prompt(path: str, fields: Fields) -> bool:
    """Tell whether both phases compute the same prompt, and only that."""
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    if several or fields.get("prompt_embeds") is not None:
        return False
    # What is cut depends on the tokens that are asked for, of which a prefill has one.
    if fields.get("truncate_prompt_tokens") is not None:
        return False
    if fields.get("truncation") not in (None, "disabled"):
        return False
    if path != "/v1/responses":
        return True
    if fields.get("request_id") is not None:
        return False  # the engine would use the client's id; of others it makes its own
    # The engine calls other tools itself, and then computes a second prompt with the same fields.
    tools = fields.get("tools") or []
    return isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
    )
