"""A Prometheus that does not start is a warning: the stack serves without it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.errors import StackUnhealthy
from deploy.output.views import up_view
from deploy.runtime import host
from deploy.stack import monitoring
from deploy.workflows.drain import DrainOptions
from deploy.workflows.restart import restart_services
from deploy.workflows.running import require_stack
from deploy.workflows.up import UpResult
from tests.unit.workflows.conftest import Lab

PROMETHEUS = """#!{python}
import pathlib, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

how = pathlib.Path({how!r}).read_text()
if how == "dies":
    sys.exit("opening storage failed: a block is broken")
if how == "hangs":
    time.sleep(600)


class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


(listen,) = [one for one in sys.argv if one.startswith("--web.listen-address=")]
HTTPServer(("127.0.0.1", int(listen.rpartition(":")[2])), Ready).serve_forever()
"""


@dataclass
class Monitored:
    """A lab with a stand-in for Prometheus, which does as it is told."""

    lab: Lab
    how: Path

    def up(self, how: str) -> UpResult:
        self.how.write_text(how)
        return self.lab.up(self.lab.spec(monitoring=True))

    def restart(self, how: str) -> None:
        self.how.write_text(how)
        options = DrainOptions(wait_s=20)
        restart_services(self.lab.home, "pdkit", "prometheus", self.lab.lines.append, options)

    def condition(self) -> str:
        running = require_stack(self.lab.home, "pdkit")
        return running.condition(running.stack.service("prometheus"))


@pytest.fixture
def monitored(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Monitored:
    program, how = tmp_path / "bin" / "prometheus", tmp_path / "how"
    program.parent.mkdir()
    program.write_text(PROMETHEUS.format(python=sys.executable, how=str(how)))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(host, "GRAFANA_HOME", str(tmp_path))  # none is installed
    return Monitored(lab, how)


def test_a_prometheus_that_dies_is_a_warning_and_can_be_started_again(monitored: Monitored) -> None:
    result = monitored.up("dies")
    monitored.lab.ask()
    assert "prometheus" not in result.started
    (warning,) = result.warnings
    assert "prometheus died while starting (exit code 1" in warning
    assert "try again: deploy restart prometheus --name pdkit" in warning
    assert "\n  opening storage failed: a block is broken" in warning
    assert f"warning: {warning}" in up_view(result, 1.0)
    with pytest.raises(StackUnhealthy, match="prometheus died while starting"):
        monitored.restart("dies")
    monitored.restart("serves")
    assert monitored.condition() == "ready"


def test_a_slow_prometheus_is_a_warning(
    monitored: Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitoring, "_PROMETHEUS_READY_S", 0.2)
    result = monitored.up("hangs")
    monitored.lab.ask()
    (warning,) = result.warnings
    assert "prometheus runs but was not ready within 0.2 s" in warning
    assert monitored.condition() == "not ready"


def test_a_prometheus_that_serves_is_no_warning(monitored: Monitored) -> None:
    result = monitored.up("serves")
    assert result.warnings == ()
    assert list(result.started)[-1] == "prometheus"
