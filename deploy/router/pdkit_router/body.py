"""Bodies of clients: JSON that an engine can read, and can refuse without being held up."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from pdkit_router.errors import Refused

# vLLM reports what is wrong with each item, and answers nothing else meanwhile: 100,000 items of a
# wrong type take it half a minute and gigabytes. Token ids are the one long list that is right.
_MOST_ITEMS = 8192
# Lists, objects and strings take up to thirty times their text, so they are counted before they are
# made: a list of token ids for each prompt, the other items, and the names of those in objects.
_MOST_PARTS = 3 * _MOST_ITEMS
_PARTS = b'[{"'
_REST = bytes(set(range(256)) - set(_PARTS))
_LARGEST = 2**63 - 1  # vLLM answers 500 to a larger one
_TOKENS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/detokenize": "tokens"}
# vLLM answers 500 where one of these is something else.
_OBJECTS = ("stream_options", "structured_outputs", "response_format")


def parsed(path: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a body; raises Refused where an engine could not read it."""
    try:
        if sum(map(body.count, _PARTS)) > _MOST_PARTS and _parts(body) > _MOST_PARTS:
            raise Refused(400, f"the body has more than {_MOST_PARTS} lists, objects and strings")
        text = body.decode("utf-8")
        gc.disable()  # it would look at each of ten million lists again and again, for nothing
        fields = _JSON.decode(text)
        if "\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()  # halves of a character
    except RecursionError:
        raise Refused(400, "the body is JSON of too many levels") from None
    except ValueError as exc:
        raise Refused(400, f"the body is not valid JSON: {str(exc)[:200]}") from None
    finally:
        gc.enable()
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object")
    _check(path, fields)
    return fields


def _parts(body: bytes) -> int:
    """Return how many lists, objects and strings there are, or more than the most.

    Its time grows with the body's length, whatever is in it. A pattern for strings would read to
    the end of the body again at each quote of a string without an end.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _REST)
    pieces = bare.split(b'"', 2 * _MOST_PARTS + 2)  # no more than refuse it
    return len(pieces) // 2 + sum(map(len, pieces[::2]))


def _check(path: str, fields: Mapping[str, Any]) -> None:
    for name in _OBJECTS:
        if not isinstance(fields.get(name), (dict, type(None))):
            raise Refused(400, f"{name} must be an object")
    tokens = _TOKENS.get(path)
    left = [value for name, value in fields.items() if name != tokens or not _are_tokens(value)]
    items = len(fields)
    if items > _MOST_ITEMS:
        raise Refused(400, f"the body has more than {_MOST_ITEMS} fields")
    while left:
        value = left.pop()
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise Refused(400, f"the body has a number beyond {_LARGEST}")
        if isinstance(value, (dict, list)):
            items += len(value)
            if items > _MOST_ITEMS:
                raise Refused(
                    400, f"the body has more than {_MOST_ITEMS} values other than token ids"
                )
            left.extend(value.values() if isinstance(value, dict) else value)


def _are_tokens(value: object) -> bool:
    """Tell whether it is one list of token ids, or several."""
    if not isinstance(value, list):
        return False
    if value and len(value) <= _MOST_ITEMS and all(isinstance(one, list) for one in value):
        return all(_is_prompt(one) for one in value)
    return _is_prompt(value)


def _is_prompt(value: list[Any]) -> bool:
    if not set(map(type, value)) <= {int}:
        return False
    return min(value, default=0) >= 0 and max(value, default=0) <= _LARGEST


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:50]} is too large")
    return value


_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)
