"""`deploy doctor` as a user types it, for engines that are processes of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.conftest import Deploy, Ran
from tests.ports import free_row, taken


def statuses(ran: Ran) -> dict[str, str]:
    return {one["id"]: one["status"] for one in ran.data["findings"]}


def finding(ran: Ran, name: str) -> dict[str, Any]:
    (one,) = [one for one in ran.data["findings"] if one["id"] == name]
    return dict(one)


def test_nothing_fails_for_the_default_stack(deploy: Deploy) -> None:
    port = str(free_row())
    first = deploy.run("doctor", "--port", port, "--json")
    assert first.code == 0, first
    found = statuses(first)
    assert "fail" not in found.values() and "unknown" not in found.values(), first
    for name in ("engine.programs", "engine.versions", "engine.plug_ins", "engine.fixes"):
        assert found[name] == "ok", first
    assert not [name for name in found if name.startswith(("gpu.", "docker.", "redis."))]
    again = deploy.run("doctor", "--port", port)
    assert again.code == 0, again
    assert "trying the connector's fixes" not in again.stderr, "once is enough"
    assert "nothing blocks `deploy up`" in again.stdout
    deploy.assert_nothing_left("pdkit", int(port))


def test_doctor_and_up_report_the_same_problem(deploy: Deploy, tmp_path: Path) -> None:
    port = free_row()
    options = ("--port", str(port), "--json")
    with taken(port + 11):
        ran, up = deploy.run("doctor", *options), deploy.run("up", *options)
    assert (ran.code, up.code) == (3, 3), f"{ran}\n{up}"
    found = finding(ran, "ports.free")
    assert found["status"] == "fail"
    assert found["message"] == up.envelope["errors"][0]["message"]
    assert found["message"].startswith(f"port {port + 11} (for consumer-0) is taken")
    (error,) = ran.envelope["errors"]
    assert found["message"] in error["message"] and error["hint"] == found["fix"]


def test_the_text_says_why_and_what_to_type(deploy: Deploy) -> None:
    port = free_row()
    (deploy.home / "deploy.yaml").write_text("engine: {python: /usr/bin/false}\n")
    ran = deploy.run("doctor", "-f", "deploy.yaml", "--port", str(port))
    assert ran.code == 3, ran
    line, why, fix = _three_lines(ran.stdout, "engine.programs")
    assert line.startswith("fail") and "does not run as a Python interpreter" in line
    assert why.startswith("why: ") and fix == "try: set engine.python in deploy.yaml"
    assert "`deploy up` would fail" in ran.stdout
    assert "error: " in ran.stderr


def _three_lines(text: str, name: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    at = next(at for at, line in enumerate(lines) if f" {name} " in line)
    return lines[at : at + 3]


def test_a_spec_that_contradicts_itself_ends_at_once(deploy: Deploy) -> None:
    ran = deploy.run("doctor", "--topology", "1p1d", "--gpus", "5", "--json")
    assert ran.code == 2, ran
    assert ran.envelope["data"] is None
    plan = deploy.run("plan", "--topology", "1p1d", "--gpus", "5", "--json")
    assert ran.envelope["errors"][0]["message"] == plan.envelope["errors"][0]["message"]
