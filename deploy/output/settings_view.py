"""Settings of a spec as a person reads them before allowing them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

_SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|KEY(?!_?FILE)", re.IGNORECASE)
_LOG_IN = re.compile(r"(?<=//)[^/\s]*@")


def settings_view(spec: object, names: Sequence[str]) -> str:
    """Return the settings of these names as lines, without secrets: 'engine.python  ./python'."""
    settings = [setting for name in names for setting in _settings(name, spec)]
    width = max(len(name) for name, _ in settings)
    return "".join(f"  {name:{width}}  {value}\n" for name, value in settings)


def _settings(name: str, found: Any) -> Iterator[tuple[str, str]]:
    """Yield a setting, or each variable of engine.env, and its value as it can be shown."""
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, dict) and found:
        for key, value in found.items():
            yield _printable(f"{name}.{key}"), "***" if _SECRET.search(key) else _shown(value)
    else:
        yield name, _shown(found)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return shlex.join(_shown(one) for one in value)
    return _printable(_LOG_IN.sub("***@", str(value)))


def _printable(text: str) -> str:
    """Return a text that cannot move the cursor or turn the direction of what is read."""
    return text if text.isprintable() else repr(text)
