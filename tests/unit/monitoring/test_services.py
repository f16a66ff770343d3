"""Prometheus and Grafana as services of a stack: what they see, and what they do not open."""

from __future__ import annotations

from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deploy.assets import asset
from deploy.config.spec import StackSpec
from deploy.errors import MissingTool, StackUnhealthy
from deploy.runtime import host
from deploy.stack.build import build_stack
from deploy.stack.containers import ContainerLayout
from deploy.stack.monitoring import prometheus_config
from deploy.stack.process_layout import ProcessLayout
from deploy.stack.service import Service
from deploy.workflows.prepare import Prepared
from deploy.workflows.running import RunningStack, require_running
from deploy.workflows.stack_images import stack_images
from tests.unit.conftest import HOME, KIT

Make = Callable[..., Prepared]
RUNTIMES = ("process", "compose")


def monitored(prepared: Make, runtime: str, **fields: Any) -> Prepared:
    return prepared(runtime=runtime, monitoring=True, **fields)


def config_of(service: Service) -> dict[str, Any]:
    file, _ = service.files
    return dict(yaml.safe_load(file.text))


def grafana_of(service: Service) -> ConfigParser:
    (file,) = service.files
    found = ConfigParser(interpolation=None)
    found.read_string(file.text)
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
class TestServices:
    def test_they_follow_the_router_and_are_only_there_if_asked_for(
        self, prepared: Make, runtime: str
    ) -> None:
        made = monitored(prepared, runtime)
        names = [service.name for service in made.stack.services]
        assert names[-3:] == ["router", "prometheus", "grafana"]
        assert made.stack.front.name == "router"
        plain = prepared(runtime=runtime)
        assert {"prometheus", "grafana"}.isdisjoint(one.name for one in plain.stack.services)
        assert set(made.plan.ports) - set(plain.plan.ports) == {8003, 8004}
        assert set(made.stack.secrets) - set(plain.stack.secrets) == {"grafana_password"}

    def test_prometheus_scrapes_every_engine_with_the_key_and_the_router(
        self, prepared: Make, runtime: str
    ) -> None:
        made = monitored(prepared, runtime, topology="2p1d", name="other")
        engines, router = config_of(made.stack.service("prometheus"))["scrape_configs"]
        seen = {one["labels"]["service"]: one for one in engines["static_configs"]}
        assert seen.keys() == {"producer-0", "producer-1", "consumer-0"}
        assert seen["producer-1"]["labels"]["role"] == "producer"
        assert all(one["labels"]["stack"] == "other" for one in seen.values())
        at = "producer-1:8000" if runtime == "compose" else "127.0.0.1:8011"
        assert seen["producer-1"]["targets"] == [at]
        assert engines["authorization"]["credentials_file"].endswith("/secrets/engine_key")
        at = "router:9000" if runtime == "compose" else "127.0.0.1:8002"
        assert router["static_configs"][0]["targets"] == [at]
        assert "authorization" not in router, "the key is for engines"
        assert not engines["follow_redirects"], "nor for whoever they might name"

    def test_lmcaches_server_is_scraped_where_there_is_one(
        self, prepared: Make, runtime: str
    ) -> None:
        made = monitored(prepared, runtime)
        served = monitored(prepared, runtime, connector="lmcache-mp")
        layout = served.facts.software.layout(served.plan.spec, HOME, served.model, KIT)
        assert isinstance(layout, ProcessLayout | ContainerLayout)
        (job,) = (
            job
            for job in yaml.safe_load(prometheus_config(served.plan, layout))["scrape_configs"]
            if job["job_name"] == "kv-server"
        )
        at = "kv-server:9000" if runtime == "compose" else "127.0.0.1:8005"
        labels = {"stack": "pdkit", "service": "kv-server"}
        assert job["static_configs"] == [{"targets": [at], "labels": labels}]
        assert "authorization" not in job, "the key is for engines"
        assert "kv-server" not in prometheus_config(made.plan, layout)

    def test_nothing_of_them_opens_administration(self, prepared: Make, runtime: str) -> None:
        made = monitored(prepared, runtime)
        options = [one for one in made.stack.service("prometheus").argv if "web." in one]
        bind = "0.0.0.0:9090" if runtime == "compose" else "127.0.0.1:8003"
        assert options == [f"--web.listen-address={bind}"]
        config = grafana_of(made.stack.service("grafana"))
        assert config["auth.anonymous"]["org_role"] == "Viewer"
        assert config["users"]["allow_sign_up"] == "false"
        assert config["security"]["admin_password"] == "@{grafana_password}"
        assert config["server"]["http_addr"] == bind.partition(":")[0]
        assert config["plugins"]["preinstall_disabled"] == "true"
        assert config["analytics"]["reporting_enabled"] == "false"

    def test_grafana_finds_prometheus_and_the_dashboards(
        self, prepared: Make, runtime: str
    ) -> None:
        grafana = monitored(prepared, runtime).stack.service("grafana")
        at = "prometheus:9090" if runtime == "compose" else "127.0.0.1:8003"
        assert grafana.env["PDKIT_PROMETHEUS_URL"] == f"http://{at}"
        folder = grafana.env["PDKIT_DASHBOARDS"].removesuffix("/dashboards")
        assert grafana_of(grafana)["paths"]["provisioning"] == f"{folder}/grafana"
        kinds = {"datasources": "PDKIT_PROMETHEUS_URL", "dashboards": "PDKIT_DASHBOARDS"}
        for kind, variable in kinds.items():
            text = asset("compose", "monitoring", "grafana", kind, "pdkit.yml").read_text()
            assert f"${variable}" in text

    def test_every_named_file_is_shipped(self, prepared: Make, runtime: str) -> None:
        made = monitored(prepared, runtime)
        rules, own = config_of(made.stack.service("prometheus"))["rule_files"]
        limits = made.stack.service("prometheus").files[1]
        assert own == (limits.target or limits.path)
        home = grafana_of(made.stack.service("grafana"))["dashboards"]
        for path in (rules, home["default_home_dashboard_path"]):
            assert asset("compose", "monitoring", *path.partition("/monitoring/")[2].split("/"))


class TestContainers:
    def test_monitoring_containers_have_no_extra_rights(self, prepared: Make) -> None:
        made = monitored(prepared, "compose")
        for name, port in (("prometheus", 8003), ("grafana", 8004)):
            container = made.stack.service(name).container
            assert container
            assert container.networks == ("front",)
            assert [(one.address, one.port) for one in container.published] == [("127.0.0.1", port)]
            written = [mount.source for mount in container.mounts if not mount.read_only]
            assert written == [str(HOME.stack("pdkit").run_dir / name / "data")]
        prometheus, grafana = (made.stack.service(name) for name in ("prometheus", "grafana"))
        assert prometheus.container and prometheus.container.secrets == ("engine_key",)
        assert grafana.container and grafana.container.secrets == ()

    def test_images_are_those_of_the_catalogue_and_only_if_asked_for(self) -> None:
        spec = StackSpec(monitoring=True)
        named = stack_images(spec, "cpu").by_name
        assert named.prometheus.startswith("prom/prometheus:v")
        assert named.grafana.startswith("grafana/grafana:")
        assert stack_images(StackSpec(), "cpu").by_name.prometheus == ""


class TestPrograms:
    def test_prometheus_runs_without_grafana(self, prepared: Make) -> None:
        made = monitored(prepared, "process")
        programs = replace(made.facts.software, grafana="")
        layout = programs.layout(made.plan.spec, HOME, made.model, KIT)
        assert isinstance(layout, ProcessLayout | ContainerLayout)
        stack = build_stack(made.plan, layout)
        assert [one.name for one in stack.services][-2:] == ["router", "prometheus"]
        assert "grafana_password" not in stack.secrets

    def test_a_missing_prometheus_is_an_error_with_its_package(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MissingTool, match="prometheus is not on PATH") as caught:
            host.find_prometheus()
        assert "apt-get install prometheus" in caught.value.hint

    def test_grafana_needs_the_files_of_its_package(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        program = tmp_path / "grafana"
        program.write_text("")
        program.chmod(0o700)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(host, "GRAFANA_HOME", tmp_path)
        assert host.find_grafana() == ""
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "defaults.ini").write_text("")
        assert host.find_grafana() == str(program)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_dead_watcher_does_not_prevent_a_check(prepared: Make, runtime: str) -> None:
    stack = monitored(prepared, runtime).stack
    dead = ["prometheus", "grafana"]
    running: Any = SimpleNamespace(
        stack=stack,
        service_state=lambda one: "exited" if one.name in dead else "running",
        stopped=lambda: RunningStack.stopped(running),
    )
    require_running(running)
    dead.append("router")
    with pytest.raises(StackUnhealthy, match=r"not running: router$"):
        require_running(running)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_grafana_reaches_prometheus_without_a_proxy(prepared: Make, runtime: str) -> None:
    assert monitored(prepared, runtime).stack.service("grafana").env["NO_PROXY"] == "*"
