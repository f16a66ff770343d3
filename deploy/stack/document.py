"""A stack as one YAML document: secrets by name only, and which secrets it would show."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from deploy.config.spec import StackSpec
from deploy.errors import ConfigError
from deploy.planning.address import host_port
from deploy.stack.service import Service, Stack

# Variables of these names hold secrets, and `docker inspect` shows a container's variables.
_SECRET_NAME = re.compile(
    r"TOKEN(?!S|IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|(?<![A-Z])PASS(?![A-Z])"
    r"|(?:ACCESS|PRIVATE|SIGNING|ENCRYPTION|OPENAI|ANTHROPIC|SSH|GPG)_?KEY"
    r"|(?<=_)(?:KEY|PWD|AUTH|PAT|CREDS?)$|(?<![A-Z])JWT(?![A-Z])",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"://[^\s/?#]*:[^\s/?#]+@")


def stack_document(stack: Stack) -> dict[str, Any]:
    """Return the document as plain values, in a stable order."""
    return {
        "stack": stack.name,
        "runtime": stack.runtime,
        "secrets": [*stack.secrets, *stack.user_secrets],
        "services": {service.name: _service(service) for service in stack.services},
    }


def document_yaml(document: dict[str, Any]) -> str:
    """Return the document as YAML; equal input gives equal bytes."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


if TYPE_CHECKING:
    _FastDumper = yaml.SafeDumper
else:  # libyaml's where there is one: several times as fast
    _FastDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_FastDumper):
    """Writes texts of several lines as blocks, so that configuration files can be read."""

    def ignore_aliases(self, _data: Any) -> bool:
        """Write repeated values in full: people read this, and compare it line by line."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _masked(name: str, value: str) -> str:
    """Mask a value whose name says that it is secret; users put tokens into `engine.env`."""
    return "***" if value and is_secret(name, value) else value


def _service(service: Service) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "role": service.role,
        "argv": list(service.argv),
        "env": {name: _masked(name, text) for name, text in sorted(service.env.items())},
        "files": {file.path: file.text for file in service.files},
        "listen": host_port(service.host, service.port) if service.port else service.socket,
        "extra_ports": list(service.extra_ports),
        "health": {"kind": service.health.kind, "path": service.health.path},
        "ready_s": service.ready_s,
        "depends_on": list(service.depends_on),
        "devices": list(service.devices),
        "memory_mib": service.memory_mib,
    }
    return {key: value for key, value in shown.items() if value not in ([], {}, 0)}


def is_secret(name: str, value: str) -> bool:
    """Tell whether a variable is likely to hold a secret, by its name or as a URL's password."""
    return bool(_SECRET_NAME.search(name) or _PASSWORD_IN_URL.search(value))


def refuse_visible_secrets(spec: StackSpec, otherwise: str = "--runtime process") -> None:
    """Refuse secrets among the engines' variables, which every user of Docker could read.

    Args:
        otherwise: what to do about one that is no token of the hub.

    Raises:
        ConfigError: naming the variable.
    """
    for name in (name for name, value in spec.engine.env.items() if is_secret(name, value)):
        raise ConfigError(
            f"{name} looks like a secret, and docker inspect and kubectl describe show a "
            "container's variables",
            setting="engine.env",
            hint="for a Hugging Face token: hf_token_file in deploy.yaml; else: " + otherwise,
        )
