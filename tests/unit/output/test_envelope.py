"""The one JSON object that scripts read."""

from __future__ import annotations

import json
from pathlib import Path

from deploy import __version__
from deploy.errors import ConfigError, StackUnhealthy
from deploy.output.envelope import envelope

KEYS = ["version", "command", "status", "exit_code", "data", "errors"]


def test_a_success_has_every_key() -> None:
    document = json.loads(envelope("plan", exit_code=0, data={"a": 1}))
    assert list(document) == KEYS
    assert document["version"] == __version__
    assert document["command"] == "plan"
    assert (document["status"], document["exit_code"]) == ("ok", 0)
    assert document["data"] == {"a": 1}
    assert document["errors"] == []


def test_a_failure_lists_its_errors() -> None:
    errors = (
        ConfigError("--gpus: 0 is not valid", hint="deploy plan --help"),
        StackUnhealthy("died", hint="less log", details=("line 1", "line 2")),
    )
    document = json.loads(envelope("up", exit_code=2, errors=errors))
    assert list(document) == KEYS
    assert (document["status"], document["exit_code"], document["data"]) == ("error", 2, None)
    assert document["errors"] == [
        {
            "code": "config",
            "message": "--gpus: 0 is not valid",
            "hint": "deploy plan --help",
            "details": [],
        },
        {
            "code": "stack_unhealthy",
            "message": "died",
            "hint": "less log",
            "details": ["line 1", "line 2"],
        },
    ]


def test_a_check_that_failed_has_both() -> None:
    document = json.loads(
        envelope("check", exit_code=1, data={"passed": False}, errors=[ConfigError("x")])
    )
    assert document["status"] == "error"
    assert document["data"] == {"passed": False}


def test_values_of_ours_are_written_as_text() -> None:
    assert json.loads(envelope("x", exit_code=0, data=Path("/a")))["data"] == "/a"
    assert "→" in envelope("x", exit_code=0, data="a → b")
