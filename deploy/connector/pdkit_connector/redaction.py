"""Take secrets out of text, and out of everything this process logs or prints."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

MASK = "***"

# Clients choose much of what is logged, so each pattern takes time in proportion to the text: what
# repeats is bounded, or begins only where no repetition is under way.
_NAME = (
    r"(?:passw(?:or)?d|passphrase|secret|(?:api|access|private|openai)_?key|(?:hf|auth)_token"
    r"|(?<=_)pass(?!\w))\w{0,64}['\"]?\s{0,8}[:=]\s{0,8}"
)
# Whatever stands between a scheme and the last @ before the path, the query or a space.
_USERINFO = re.compile(r"(?<![\w+.-])([\w+.-]+://)([^\s/?#]*)@")
# unix://…?password=… and the like.
_QUERY = re.compile(r"([?&](?:password|passwd|secret)=)[^&\s'\"]+", re.IGNORECASE)
# 'password': 'x', "redis_password"="x" in dumped dictionaries.
_PAIR = re.compile(rf"""({_NAME})(['"]).*?\2""", re.IGNORECASE)
# The same in a configuration file, where the value may stand bare.
_SETTING = re.compile(rf"""{_NAME}['"]?([^\s'",}}]+)""", re.IGNORECASE)
# No message is worth more. A secret that the cut divides is in what is looked at and not shown.
_LONGEST, _BEYOND = 1 << 16, 1 << 12
# Shorter words than this would blank unrelated text when replaced literally.
_MIN_LITERAL = 6


class Redactor:
    """Mask secrets by shape (URLs, pairs) and, for those known beforehand, by value."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        words = {w for word in known for w in (word, unquote(word)) if len(w) >= _MIN_LITERAL}
        self._known = sorted(words, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return `text` with every secret replaced by a mask, and cut if it is too long."""
        if len(text) > _LONGEST + _BEYOND:
            shown = self._masked(text[: _LONGEST + _BEYOND])[:-_BEYOND]
            return f"{shown}... (a text of {len(text)} characters)" + "\n" * text.endswith("\n")
        return self._masked(text)

    def _masked(self, text: str) -> str:
        for word in self._known:
            if word in text:
                text = text.replace(word, MASK)
        if "://" in text:
            text = _USERINFO.sub(rf"\1{MASK}@", text)
            text = _QUERY.sub(rf"\1{MASK}", text)
        return _PAIR.sub(rf"\1\2{MASK}\2", text)


def secrets_in(text: str) -> frozenset[str]:
    """Return the passwords found in the URLs and pairs of `text`."""
    userinfos = (match.group(2) for match in _USERINFO.finditer(text))
    passwords = {info.partition(":")[2] for info in userinfos}
    passwords |= {match.group(1) for match in _SETTING.finditer(text)}
    return frozenset(passwords - {""})


def known_secrets(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the passwords in LMCache's environment and configuration file."""
    texts = [value for name, value in environ.items() if name.startswith("LMCACHE_")]
    if path := environ.get("LMCACHE_CONFIG_FILE"):
        # LMCache reports an unreadable file better than this can.
        with suppress(OSError, UnicodeDecodeError):
            texts.append(Path(path).read_text(encoding="utf-8"))
    found = {secret for text in texts for secret in secrets_in(text)}
    found |= {
        value
        for name, value in environ.items()
        if name.startswith("LMCACHE_") and "PASSWORD" in name
    }
    return frozenset(found - {""})


def install(redactor: Redactor) -> None:
    """Redact every log record, and all that goes to stdout and stderr, from now on."""
    logging.setLogRecordFactory(record_factory(logging.getLogRecordFactory(), redactor))
    for stream in (sys.stdout, sys.stderr):
        redact_stream(stream, redactor)


def record_factory(
    make: Callable[..., logging.LogRecord], redactor: Redactor
) -> Callable[..., logging.LogRecord]:
    """Wrap a log record factory: messages and tracebacks come out redacted.

    Records reach files and collectors too, not only the standard streams.
    """

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        _redact_record(record, redactor)
        return record

    return make_redacted


def redact_stream(stream: TextIO, redactor: Redactor) -> None:
    """Redact what is written to `stream`: prints and tracebacks pass no logger."""
    write = stream.write

    def write_redacted(text: str) -> int:
        write(redactor(text))
        return len(text)

    stream.write = write_redacted  # type: ignore[method-assign]


def _redact_record(record: logging.LogRecord, redactor: Redactor) -> None:
    try:
        message = record.getMessage()
    except (TypeError, ValueError):
        return  # a malformed call: logging reports it itself, on the redacted stream
    clean = redactor(message)
    if clean != message:
        record.msg, record.args = clean, None
    if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
        text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if redactor(text) != text:
            # The formatter prints exc_text where it is set, and formats exc_info where it is not.
            record.exc_text = redactor(text)
