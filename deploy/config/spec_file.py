"""Reads deploy.yaml. A separate module, because runs without that file should not import YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deploy.errors import ConfigError


class _DuplicateKeyError(Exception):
    """A duplicate key in a mapping; the message names it and both lines."""


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    first = lines[key.value]
                    where = f"lines {first} and {line}" if first != line else f"line {line}"
                    raise _DuplicateKeyError(f"duplicate key '{key.value}' ({where})")
                lines[key.value] = line
        return super().construct_mapping(node, deep=deep)


def read_spec_file(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the settings of a deploy.yaml, and the content that they are from.

    A key without a value counts as not given.

    Raises:
        ConfigError: it cannot be read, is not YAML, or has a key twice.
    """
    try:
        content = path.read_bytes()
        document = yaml.load(content.decode(), Loader=_Loader)  # noqa: S506 - safe
    except OSError as exc:
        raise ConfigError(
            f"-f {path}: cannot be read ({exc.strerror})", hint="name an existing file with -f"
        ) from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}: not valid YAML{where}", hint=f"fix {path} and run the command again"
        ) from exc
    except _DuplicateKeyError as exc:
        raise ConfigError(
            f"{path}: {exc}", hint=f"remove one of them from {path} and run the command again"
        ) from exc
    except (ValueError, RecursionError) as exc:  # no such day, a number too long, too many levels
        raise ConfigError(f"{path}: {exc}", hint=f"fix {path} and run the command again") from exc
    if document is None:
        return {}, content
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: expected a mapping at the top level, not a {type(document).__name__}",
            hint=f"write {path} as lines such as 'topology: 1p1d'",
        )
    settings = {str(field): value for field, value in document.items() if value is not None}
    return settings, content
