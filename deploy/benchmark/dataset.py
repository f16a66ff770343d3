"""Reads a dataset or a trace: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.benchmark.workloads import BLOCK_TOKENS, FILE_WORKLOADS, Line, Prompt, WorkloadOptions
from deploy.errors import UsageError

_SHOWN = 3  # broken lines that an error quotes
_NUMBERED = 10  # skipped lines that a warning names
_LATEST_MS = 1e12  # some 30 years; JSON has Infinity and numbers that no float holds
_FORMAT = "docs/reference/bench.md shows the format"


def fitting_lines(options: WorkloadOptions, context: int) -> tuple[list[Line], list[int]]:
    """Return a file's usable lines and the numbers of those skipped; none of both without a file.

    Raises:
        UsageError: the workload does not fit the model's context, or its file cannot be used.
    """
    if options.name in FILE_WORKLOADS:
        return read_lines(options, context)
    if options.longest > context:
        raise UsageError(
            f"--workload {options.name}: up to {options.longest} tokens do not fit the model's "
            f"context of {context}",
            hint="lower --input-tokens, --output-tokens, --prefix-tokens or --turns",
        )
    return [], []


def read_lines(options: WorkloadOptions, context: int) -> tuple[list[Line], list[int]]:
    """Return the usable lines of the workload's file, and the numbers of those skipped.

    Args:
        context: tokens that the model takes, prompt and answer together.

    Raises:
        UsageError: the file cannot be read, has no usable line, or has broken lines that are not
            to be skipped.
    """
    file = options.file
    if file is None:
        raise UsageError(
            f"--workload {options.name} needs a file",
            hint=f"deploy bench --workload {options.name} --file FILE.jsonl; of a sweep, --dataset",
        )
    lines: list[Line] = []
    broken: dict[int, str] = {}
    # Not splitlines(), which also ends a line at characters that a JSON string may have.
    for number, text in enumerate(_text(file).split("\n"), 1):
        if text.strip():
            try:
                lines.append(_line(text, options, context))
            except ValueError as exc:
                broken[number] = f"line {number}: {exc}"
    total = len(lines) + len(broken)
    if broken and not (options.skip_broken and lines):
        more = f"; and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        raise UsageError(
            f"{file}: {len(broken)} of {total} lines cannot be used: "
            + "; ".join(list(broken.values())[:_SHOWN])
            + more,
            hint="fix them, or add --skip-broken to leave them out" if lines else _FORMAT,
        )
    if not lines:
        raise UsageError(f"{file}: no lines", hint=_FORMAT)
    return sorted(lines, key=lambda line: line.start_s), list(broken)


def left_out(file: Path | None, numbers: Sequence[int]) -> str:
    """Name the lines of a file that were skipped."""
    shown = ", ".join(map(str, numbers[:_NUMBERED]))
    more = f" and {len(numbers) - _NUMBERED} more" if len(numbers) > _NUMBERED else ""
    lines = "1 line" if len(numbers) == 1 else f"{len(numbers)} lines"
    return f"{lines} of {file} left out: {shown}{more}"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageError(f"{file}: {why}", hint="name a JSONL file") from exc


def _line(text: str, options: WorkloadOptions, context: int) -> Line:
    """Return a line.

    Raises:
        ValueError: why it cannot be used.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    line = _of_trace(document) if options.name == "trace" else _of_dataset(document)
    answer = line.output_tokens or options.output_tokens.high
    if line.input_tokens + answer > context:
        raise ValueError(
            f"{line.input_tokens} tokens and an answer of {answer} do not fit the model's context "
            f"of {context}"
        )
    return line


def _of_trace(document: Mapping[str, Any]) -> Line:
    blocks = document.get("hash_ids", [])
    if not _are_numbers(blocks):
        raise ValueError("'hash_ids' is not a list of numbers")
    tokens = _count(document, "input_length")
    if blocks and len(blocks) * BLOCK_TOKENS < tokens:
        raise ValueError(f"{len(blocks)} 'hash_ids' of {BLOCK_TOKENS} tokens are too few")
    at = document.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at <= _LATEST_MS:
        raise ValueError("'timestamp' is not a number of milliseconds")
    return Line(None, tokens, _count(document, "output_length"), at / 1000, tuple(blocks))


def _of_dataset(document: Mapping[str, Any]) -> Line:
    prompt = _prompt(document)
    tokens = len(prompt) if isinstance(prompt, tuple) else 0
    wanted = _count(document, "output_tokens") if "output_tokens" in document else None
    return Line(prompt, tokens, wanted)


def _prompt(document: Mapping[str, Any]) -> Prompt:
    prompt, messages = document.get("prompt"), document.get("messages")
    if isinstance(prompt, str) and prompt:
        return prompt
    if prompt and _are_numbers(prompt):
        return tuple(prompt)
    if prompt is not None:
        raise ValueError("'prompt' is neither text nor token ids")
    if messages is None:
        raise ValueError("no 'prompt' and no 'messages'")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError("'messages' is not a list of messages with 'role' and 'content'")
    return messages


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _count(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(f"'{key}' is not a number above 0")
    return value
