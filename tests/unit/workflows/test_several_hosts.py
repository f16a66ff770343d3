"""Two hosts with a Redis in common: producers here, consumer and router there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.redis_server import HOST, RedisServer
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError, EngineUnreachable, StateError
from deploy.output.plan_view import plan_view
from deploy.output.views import status_view, up_view
from deploy.tiny_model import ensure_tiny_model
from deploy.verify.findings import Findings
from deploy.workflows.bench.passes import BenchOptions
from deploy.workflows.bench.run import bench_stack
from deploy.workflows.check import check_stack
from deploy.workflows.down import stop_stack
from deploy.workflows.drain import DrainOptions, drain
from deploy.workflows.evidence import Readings, _store_facts
from deploy.workflows.restart import restart_services
from deploy.workflows.running import kv_server_page, require_stack, store_of
from deploy.workflows.status import stack_status
from deploy.workflows.swap import SwapTo, roll_back, swap_stack
from deploy.workflows.up import UpResult, bring_up
from tests.unit.workflows.conftest import SMALL, Lab, opened, silent_at_first


@dataclass
class Hosts:
    """Two homes, as two hosts have them.

    The stand-ins for engines listen on loopback, whatever they are told; so does the Redis.
    """

    worker: Lab
    front: Lab
    redis_url: Path
    key: Path
    model: Path

    def spec(self, lab: Lab, **fields: Any) -> StackSpec:
        given = {"key_file": str(self.key), **fields.pop("engine", {})}
        base = lab.spec(redis={"url_file": str(self.redis_url)})
        engine = {**base.engine.model_dump(), **given}
        given = {"engine": engine, "model": str(self.model), **fields}
        return StackSpec.model_validate({**base.model_dump(), **given})

    def worker_spec(self, **fields: Any) -> StackSpec:
        bind = {"bind": "0.0.0.0"}  # noqa: S104 - not bound
        return self.spec(self.worker, producers=2, consumers=0, engine=bind, **fields)

    def front_spec(self, **fields: Any) -> StackSpec:
        plan = require_stack(self.worker.home, "pdkit").prepared.plan
        engines = [{"role": one.role, "url": f"http://{HOST}:{one.port}"} for one in plan.engines]
        return self.spec(
            self.front, producers=0, consumers=1, router={"engines": engines}, **fields
        )


def reporting(**facts: str) -> str:
    """Return what an engine reports of its KV."""
    text = json.dumps(facts).replace('"', '\\"')
    return f'pdkit_kv_info{{facts="{text}"}} 1'


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    facts = {"namespace": "NAMESPACE", "vllm": "0.32.0+cpu", "lmcache": "0.5.6"}
    monkeypatch.setenv("STAND_IN_REPORT", reporting(**facts))
    with ExitStack() as opening:
        labs = [opening.enter_context(opened(tmp_path / name)) for name in ("a", "b")]
        server = opening.enter_context(RedisServer(tmp_path))
        url, key = tmp_path / "redis-url", tmp_path / "engine-key"
        url.write_text(f"{server.url}\n")
        key.write_text("0123456789abcdef\n")
        # A model in a folder has the same path on all hosts, which the keys of KV carry.
        yield Hosts(*labs, url, key, ensure_tiny_model(tmp_path / "models"))


def test_a_router_uses_the_engines_of_another_host(hosts: Hosts) -> None:
    up = hosts.worker.up(hosts.worker_spec(), check=True)
    assert list(up.started) == ["producer-0", "producer-1"], "no router, and no check without one"
    ports = [engine.port for engine in up.running.prepared.plan.engines]
    listed = ", ".join(f"{{role: producer, url: 'http://HOST:{port}'}}" for port in ports)
    assert f"router.engines: [{listed}]; HOST is an address of this host" in up_view(up, 1.0)
    assert stack_status(hosts.worker.home, "pdkit").url == ""

    spec = hosts.front_spec()
    started = hosts.front.up(spec, check=True)
    assert list(started.started) == ["consumer-0", "router"]
    report = check_stack(hosts.front.home, "pdkit", hosts.front.lines.append)
    assert report.passed, report.failures
    assert [(one.producer, one.consumer, one.hits.eligible_rate) for one in report.pairs] == [
        ("producer-0", "consumer-0", 1.0), ("producer-1", "consumer-0", 1.0),
    ]  # fmt: skip

    status = stack_status(hosts.front.home, "pdkit")
    assert status.healthy
    remote = [one for one in status.services if one.role == "producer"]
    assert [(one.pid, one.log) for one in remote] == [(0, ""), (0, "")]
    assert f"producer-0 ({spec.router.engines[0].url})" in status_view(status)
    assert spec.router.engines[0].url in plan_view(started.running.prepared)

    _assert_commands_that_need_the_other_host(hosts)
    _assert_the_other_hosts_end_is_seen(hosts)


def _assert_commands_that_need_the_other_host(hosts: Hosts) -> None:
    lab = hosts.worker
    for command in (
        lambda: check_stack(lab.home, "pdkit", lab.lines.append),
        lambda: drain(lab.home, "pdkit", "producer-0", lab.lines.append, DrainOptions()),
    ):
        with pytest.raises(StateError, match="no router on this host"):
            command()
    restarted = restart_services(lab.home, "pdkit", "producer-1", lab.lines.append, DrainOptions())
    assert list(restarted.seconds) == ["producer-1"]
    with pytest.raises(StateError, match="engines of other hosts"):
        bench_stack(
            hosts.front.home, "pdkit", BenchOptions(),
            folder=hosts.front.folder, command=(), report=hosts.front.lines.append,
        )  # fmt: skip


def _assert_the_other_hosts_end_is_seen(hosts: Hosts) -> None:
    stop_stack(hosts.worker.home, "pdkit", hosts.worker.lines.append)
    status = stack_status(hosts.front.home, "pdkit")
    assert {"producer-0", "producer-1"} <= set(status.sick)
    hosts.front.ask()  # computed by the consumer


def test_parts_that_do_not_fit_are_refused_before_anything_starts(hosts: Hosts) -> None:
    hosts.worker.up(hosts.worker_spec())
    other = hosts.key.with_name("other-key")
    other.write_text("another")
    engine = {"key_file": str(other)}
    with pytest.raises(ConfigError, match="requires a different key") as caught:
        hosts.front.up(hosts.front_spec(engine=engine))
    assert str(other) in caught.value.hint

    spec = hosts.front_spec()
    stop_stack(hosts.worker.home, "pdkit", hosts.worker.lines.append)
    with pytest.raises(EngineUnreachable, match="cannot be used: no answer"):
        hosts.front.up(spec)
    assert hosts.front.pids() == []
    assert hosts.front.files() == []


def test_engines_with_other_keys_of_kv_are_refused(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_REPORT", reporting(namespace="pdkit:pdkit:1"))
    hosts.worker.up(hosts.worker_spec())
    with pytest.raises(ConfigError, match="keeps its KV under pdkit:pdkit:1, this host under"):
        bring_up_resumed(hosts.front, hosts.front_spec())
    assert hosts.front.pids() == []


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (
            'pdkit_fix_info{fix="B17",state="applied"} 1',
            "reports no KV settings of pdkit; was it started",
        ),
        (reporting(vllm="0.32.0"), "reports no KV settings of pdkit"),
        (reporting(namespace="NAMESPACE", vllm="0.31.0"), "runs vLLM 0.31.0, this host 0.32.0"),
        (reporting(namespace="NAMESPACE", lmcache="0.5.5"), "runs LMCache 0.5.5, this host 0.5.6"),
        (
            reporting(namespace="NAMESPACE") + '\npdkit_connector_info{lmcache="0.5.5"} 1',
            "runs LMCache 0.5.5, this host 0.5.6",
        ),
    ],
)
def test_engines_without_a_report_or_of_other_versions_are_refused(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, report: str, said: str
) -> None:
    monkeypatch.setenv("STAND_IN_REPORT", report)
    hosts.worker.up(hosts.worker_spec())
    with pytest.raises(ConfigError, match=said):
        hosts.front.up(hosts.front_spec())
    assert hosts.front.pids() == []


def test_another_hosts_engine_whose_worker_is_late_is_asked_again(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.worker.up(hosts.worker_spec())
    silent_at_first(monkeypatch, 1)
    assert list(hosts.front.up(hosts.front_spec()).started) == ["consumer-0", "router"]


@pytest.mark.parametrize("check", [False, True])
def test_a_stack_is_resumed_without_a_lost_host(hosts: Hosts, check: bool) -> None:
    hosts.worker.up(hosts.worker_spec())
    spec = hosts.front_spec()
    hosts.front.up(spec)
    stop_stack(hosts.worker.home, "pdkit", hosts.worker.lines.append)
    ended = [psutil.Process(pid) for pid in hosts.front.pids()]
    for process in ended:  # as a reboot ends them
        process.kill()
    psutil.wait_procs(ended, timeout=5)
    resumed = bring_up_resumed(hosts.front, spec, check=check)
    assert set(resumed.started) == {"consumer-0", "router"}
    (warning,) = resumed.warnings
    assert warning.startswith("producer-0, producer-1 of another host: no answer")
    assert ("not checked" in warning) is check
    url = spec.router.engines[1].url
    assert any(f"the engine at {url} cannot be used" in one for one in hosts.front.lines)
    hosts.front.ask()  # computed by the consumer


def test_another_key_is_refused_when_resuming(hosts: Hosts) -> None:
    hosts.worker.up(hosts.worker_spec())
    other = hosts.key.with_name("other-key")
    other.write_text("another")
    with pytest.raises(ConfigError, match="requires a different key"):
        bring_up_resumed(hosts.front, hosts.front_spec(engine={"key_file": str(other)}))
    assert hosts.front.pids() == []


def bring_up_resumed(lab: Lab, spec: StackSpec, *, check: bool = False) -> UpResult:
    return bring_up(spec, lab.home, lab.lines.append, check=check, resumed=True)[0]


def test_a_restart_is_of_this_hosts_engines(hosts: Hosts) -> None:
    hosts.worker.up(hosts.worker_spec())
    spec = hosts.front_spec()
    hosts.front.up(spec)
    lab, drain_file = hosts.front, hosts.front.home.stack("pdkit").drain_file
    url = spec.router.engines[0].url
    with pytest.raises(StateError) as caught:
        restart_services(
            lab.home, "pdkit", "producer-0", lab.lines.append, DrainOptions(force=True)
        )
    assert caught.value.message == f"producer-0 runs on another host ({url})"
    assert "deploy drain producer-0" in caught.value.hint
    assert not drain_file.exists() or "producer-0" not in drain_file.read_text()
    result = restart_services(lab.home, "pdkit", None, lab.lines.append, DrainOptions(force=True))
    assert list(result.seconds) == ["consumer-0"]


def test_each_host_has_a_server_of_lmcache(hosts: Hosts) -> None:
    mp = {"connector": "lmcache-mp", "lmcache": {"chunk_size": SMALL["lmcache"]["chunk_size"]}}
    spec = hosts.worker_spec(**mp)
    hosts.worker.up(spec)
    assert set(hosts.front.up(hosts.front_spec(**mp)).started) >= {"kv-server", "consumer-0"}
    lab = hosts.worker
    again = restart_services(lab.home, "pdkit", "kv-server", lab.lines.append, DrainOptions())
    assert list(again.seconds) == ["kv-server"], "though no router is here to ask its engines by"
    hosts.redis_url.write_text(f"{hosts.redis_url.read_text().strip()}/1\n")
    assert set(lab.up(spec).started) == {"kv-server"}, "which alone uses Redis"

    running = require_stack(hosts.front.home, "pdkit")
    silent, answers = (
        Readings(None, None, {}, {}),
        Readings(None, None, {}, kv_server_page(running)),
    )
    with store_of(running) as store:
        seen = [_store_facts(running, Findings(), one, store).name for one in (silent, answers)]
    assert seen == ["LMCache's server", "Redis"], "between hosts, KV crosses through Redis"


def test_a_swap_is_refused_where_it_could_not_be_checked(hosts: Hosts) -> None:
    hosts.worker.up(hosts.worker_spec())
    lab = hosts.worker
    for change in (
        lambda: swap_stack(lab.home, "pdkit", SwapTo(connector="lmcache-mp"), lab.lines.append),
        lambda: roll_back(lab.home, "pdkit", report=lab.lines.append),
    ):
        with pytest.raises(StateError, match="no router on this host") as caught:
            change()
        assert "on every host" in caught.value.hint
    hosts.front.up(hosts.front_spec())
    with pytest.raises(ConfigError, match="keeps its KV under"):
        swap_stack(
            hosts.front.home, "pdkit", SwapTo(connector="lmcache-mp"), hosts.front.lines.append
        )
    assert stack_status(hosts.front.home, "pdkit").healthy


def test_a_new_key_restarts_what_holds_the_old_one(hosts: Hosts) -> None:
    spec = hosts.worker_spec()
    hosts.worker.up(spec)
    hosts.key.write_text("fedcba9876543210")
    assert set(hosts.worker.up(spec).started) == {"producer-0", "producer-1"}
    assert hosts.worker.up(spec).started == {}


@pytest.mark.parametrize("text", ["two words", "schlüssel", ""])
def test_a_file_that_holds_no_key(hosts: Hosts, text: str) -> None:
    hosts.key.write_text(text)
    with pytest.raises(ConfigError, match=r"engine\.key_file: .*engine-key"):
        hosts.worker.up(hosts.worker_spec())
    assert hosts.worker.pids() == []
