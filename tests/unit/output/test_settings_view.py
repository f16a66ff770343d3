"""Settings that a person reads before allowing them."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config.spec import StackSpec
from deploy.output.settings_view import settings_view


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("engine.args", ["--a b", "--c"], "engine.args  '--a b' --c"),
        ("engine.args", [], "engine.args  "),
        ("engine.env", {}, "engine.env  {}"),
        ("engine.env", {"HF_TOKEN": "hf_x"}, "engine.env.HF_TOKEN  ***"),
        ("engine.env", {"MY_PASSWORD": "x"}, "engine.env.MY_PASSWORD  ***"),
        ("engine.env", {"LD_PRELOAD": "./x.so"}, "engine.env.LD_PRELOAD  ./x.so"),
        ("engine.env", {"P": "http://a:b@c@d/"}, "engine.env.P  http://***@d/"),
        ("engine.env", {"X": "\u202eb"}, "engine.env.X  '\\u202eb'"),
        ("engine.key_file", "/key", "engine.key_file  /key"),
        ("redis.tls_files", ["/a", "/b"], "redis.tls_files  /a /b"),
    ],
)
def test_a_setting_as_it_is_shown(name: str, value: Any, shown: str) -> None:
    section, key = name.split(".")
    spec = StackSpec.model_validate({section: {key: value}})
    assert settings_view(spec, (name,)) == f"  {shown}\n"


def test_values_stand_in_a_column() -> None:
    spec = StackSpec.model_validate({"bind": "127.0.0.2", "monitoring": True})
    assert settings_view(spec, ("bind", "monitoring")) == (
        "  bind        127.0.0.2\n  monitoring  True\n"
    )
