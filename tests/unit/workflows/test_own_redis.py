"""Stacks whose Redis the user brings: found, asked, watched, and left as it was."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from bench.redis_server import HOST, RedisServer
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError, RedisUnreachable, StateError
from deploy.output.check_view import check_view
from deploy.output.views import down_view, status_view
from deploy.planning.inventory import Inventory
from deploy.runtime.process.sessions import has_ended
from deploy.runtime.url_store import UrlStore
from deploy.workflows import swap, user_redis
from deploy.workflows.check import check_stack
from deploy.workflows.down import remaining_keys, stop_stack
from deploy.workflows.facts import facts_here
from deploy.workflows.logs import chosen_services, log_source
from deploy.workflows.prepare import Facts, Prepared
from deploy.workflows.running import require_stack
from deploy.workflows.software import Containers
from deploy.workflows.status import stack_status
from deploy.workflows.swap import SwapTo, roll_back, swap_stack
from deploy.workflows.user_redis import redis_url
from tests.ports import unused_port
from tests.unit.stack.cases import machine_with
from tests.unit.workflows.conftest import Lab

SERVICES = ["producer-0", "consumer-0", "router"]
PASSWORD = "open'sesame"
WRITTEN = "open%27sesame"


@dataclass
class Own:
    """A lab, a running Redis with a password, and the file that holds its URL."""

    lab: Lab
    servers: ExitStack
    port: int = 0
    stops: Callable[[], object] = field(default=lambda: None)

    @property
    def file(self) -> Path:
        return self.lab.folder / "redis-url"

    def spec(self, **fields: Any) -> StackSpec:
        return self.lab.spec(redis={"url_file": str(self.file)}, **fields)

    def client(self) -> redis.Redis:
        return redis.Redis(HOST, self.port, password=PASSWORD)

    def start(self, *options: str) -> None:
        folder, self.port = self.lab.folder, unused_port()
        one = RedisServer(folder, "--requirepass", PASSWORD, *options, port=self.port)
        self.stops = self.servers.enter_context(one).kill
        self.file.write_text(f"redis://:{WRITTEN}@{HOST}:{self.port}\n")

    def pids(self) -> dict[str, int]:
        services = require_stack(self.lab.home, "pdkit").state.services
        return {name: record.pid for name, record in services.items()}


@pytest.fixture
def own(lab: Lab) -> Iterator[Own]:
    with ExitStack() as servers:
        made = Own(lab, servers)
        made.start()
        yield made


def shows_no_password(text: str) -> bool:
    return not [word for word in (PASSWORD, WRITTEN, "sesame") if word in text]


def test_a_stack_with_a_users_redis_starts_is_checked_and_ends(own: Own) -> None:
    own.client().mset({"other": b"x", "pdkit:pdkit-2:1": b"x"})
    lab, spec = own.lab, own.spec()
    up = lab.up(spec, check=True)
    assert list(up.started) == SERVICES
    lab.ask()
    status = stack_status(lab.home, "pdkit")
    assert status.healthy
    assert [service.name for service in status.services] == SERVICES
    assert status.store is not None
    assert status.store.keys == own.client().dbsize() > 2
    assert "your own Redis: " in status_view(status)
    assert "of no limit" in status_view(status)
    with pytest.raises(StateError, match="no service 'redis'"):
        chosen_services(log_source(lab.home, "pdkit"), "pdkit", "redis")

    checked = check_stack(lab.home, "pdkit", lab.lines.append)
    assert checked.passed, checked.failures
    assert lab.up(spec).started == {}

    _assert_private(own)
    mine = len(own.client().keys("pdkit:pdkit:*"))
    down = stop_stack(lab.home, "pdkit", lab.lines.append)
    assert sorted(down.stopped) == sorted(SERVICES)
    assert f"{mine} keys pdkit:pdkit:* stay in your Redis" in down_view(down)
    assert own.client().dbsize() == mine + 2
    assert lab.pids() == []
    assert lab.files() == ["canaries/pdkit.json"], "the KV that the next check looks at stays, too"

    again = stop_stack(lab.home, "pdkit", lab.lines.append, volumes=True, url_file=own.file)
    assert not again.was_up
    assert f"removed from your Redis: {mine} keys" in down_view(again)
    assert sorted(own.client().keys()) == [b"other", b"pdkit:pdkit-2:1"]
    assert lab.files() == []


def _assert_private(own: Own) -> None:
    for pid in own.lab.pids():
        process = psutil.Process(pid)
        assert shows_no_password(" ".join((*process.cmdline(), *process.environ().values())))
    holding = []
    for path in own.lab.home.stack("pdkit").root.rglob("*"):
        if path.is_file() and WRITTEN in path.read_text(errors="replace"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            holding.append(path.name)
    assert sorted(holding) == ["lmcache.yaml", "lmcache.yaml", "redis_url"]
    assert shows_no_password(" ".join(own.lab.lines))


def test_down_can_remove_what_the_stack_stored(own: Own) -> None:
    own.client().set("other", b"x")
    own.lab.up(own.spec(), check=True)
    own.lab.ask()
    down = stop_stack(own.lab.home, "pdkit", own.lab.lines.append, volumes=True)
    assert down.left is not None
    assert down.left.removed
    assert down.left.keys == 3 + 2, "a check leaves its canary of two chunks only"
    assert own.client().keys() == [b"other"]


def test_down_of_a_stack_whose_redis_is_gone(own: Own) -> None:
    own.lab.up(own.spec())
    own.stops()
    down = stop_stack(own.lab.home, "pdkit", own.lab.lines.append, volumes=True)
    assert down.was_up
    assert own.lab.files() == []
    assert down.left is not None
    assert "refused" in down.left.why_not
    assert "may remain in your Redis" in down_view(down)


def test_down_of_lmcaches_own_client(own: Own) -> None:
    """Its keys do not say whose they are, so nothing is counted, and nothing of others removed."""
    own.client().set("pdkit:pdkit:x", b"x")
    left = remaining_keys(own.file.read_text().strip(), "pdkit", client="lmcache", remove=True)
    assert left.keys is None
    assert "LMCache's own client" in left.why_not
    assert own.client().dbsize() == 1


@pytest.mark.parametrize("why", ["gone", "password", "another program"])
def test_a_redis_that_cannot_be_used_stops_up_before_anything(own: Own, why: str) -> None:
    if why == "gone":
        own.stops()
    elif why == "password":
        own.file.write_text(f"redis://:wrongword@{HOST}:{own.port}")
    else:
        own.file.write_text(f"rediss://:{WRITTEN}@{HOST}:{own.port}")
    with pytest.raises(RedisUnreachable) as caught:
        own.lab.up(own.spec())
    said = f"{caught.value.message} {caught.value.hint}"
    assert caught.value.message.startswith("redis.url_file: the Redis at redis")
    assert f"{HOST}:{own.port} cannot be used: " in caught.value.message
    assert str(own.file) in caught.value.hint
    assert shows_no_password(said)
    assert "wrongword" not in said
    assert own.lab.pids() == []
    assert own.lab.files() == []


def test_a_redis_that_dies_later(own: Own) -> None:
    own.lab.up(own.spec())
    pids = own.pids()
    own.stops()
    status = stack_status(own.lab.home, "pdkit")
    assert not status.healthy
    assert status.sick == ["the Redis of redis.url_file"]
    assert "your own Redis: does not answer" in status_view(status)
    report = check_stack(own.lab.home, "pdkit", own.lab.lines.append)
    assert not report.passed
    assert "Redis does not answer" in report.failures
    assert report.diagnosis[0].code == "store_unreachable"
    assert "logs redis" not in check_view(report)
    assert "redis.url_file" in report.diagnosis[0].hint
    with pytest.raises(StateError, match="another plan"):
        own.lab.up(own.lab.spec(port=own.spec().port))
    assert own.pids() == pids


def test_limited_rights_of_the_redis_user_do_not_fail_a_check(own: Own) -> None:
    own.client().acl_setuser("kv", enabled=True, passwords=["+word"], keys=["pdkit:*"],
                             commands=["+getrange", "+set", "+strlen", "+exists"])  # fmt: skip
    own.file.write_text(f"redis://kv:word@{HOST}:{own.port}")
    own.lab.up(own.spec())
    report = check_stack(own.lab.home, "pdkit", own.lab.lines.append)
    assert report.passed, report.failures
    assert "Redis: ? → ? keys, ? of ? used, ? evicted; ? keys of the check removed" in check_view(
        report
    )
    assert "your own Redis: ? keys, ? of ?, ? evicted" in status_view(
        stack_status(own.lab.home, "pdkit")
    )
    down = stop_stack(own.lab.home, "pdkit", own.lab.lines.append)
    assert down.left is not None
    assert "permission" in down.left.why_not


def test_a_file_that_names_another_redis_restarts_the_engines(own: Own) -> None:
    spec = own.spec()
    own.lab.up(spec)
    before, first = own.pids(), own.port
    text = own.file.read_text()

    own.file.write_text("redis://:wrongword@nowhere.invalid:port")
    with pytest.raises(ConfigError, match=r"redis\.url_file: the redis:// URL in .* is invalid"):
        own.lab.up(spec)
    own.file.write_text(f"redis://:{WRITTEN}@{HOST}:{unused_port()}")
    with pytest.raises(RedisUnreachable):
        own.lab.up(spec)
    assert own.pids() == before, "the stack goes on with the one it has"

    own.start()
    assert own.port != first
    assert set(own.lab.up(spec, check=True).started) == {"producer-0", "consumer-0"}
    own.lab.ask()
    assert own.client().dbsize() > 0
    assert own.pids()["router"] == before["router"]
    own.file.write_text(text)
    assert set(own.lab.up(spec).started) == {"producer-0", "consumer-0"}


def test_another_file_is_another_plan(own: Own) -> None:
    spec = own.spec()
    own.lab.up(spec)
    other = own.lab.folder / "other"
    other.write_text(own.file.read_text())
    changed = spec.redis.model_copy(update={"url_file": other})
    with pytest.raises(StateError, match=r"redis\.url_file \(.*redis-url, requested: .*other\)"):
        own.lab.up(spec.model_copy(update={"redis": changed}))


def test_a_file_that_was_taken_away(own: Own, eventually: Callable[..., None]) -> None:
    """What runs goes on, and what died of it comes back."""
    spec = own.spec()
    own.lab.up(spec)
    own.file.unlink()
    assert own.lab.up(spec).started == {}
    pid = own.pids()["consumer-0"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: has_ended(psutil.Process(pid)))
    assert set(own.lab.up(spec, check=True).started) == {"consumer-0"}
    stop_stack(own.lab.home, "pdkit", own.lab.lines.append)
    with pytest.raises(ConfigError, match=r"redis\.url_file: .* cannot be read"):
        own.lab.up(spec)


def test_a_secret_that_was_deleted(own: Own) -> None:
    spec = own.spec()
    own.lab.up(spec)
    (own.lab.home.stack("pdkit").secrets_dir / "redis_url").unlink()
    with pytest.raises(StateError, match="is missing") as caught:
        check_stack(own.lab.home, "pdkit", own.lab.lines.append)
    assert "deploy up --resume" in caught.value.hint
    assert set(own.lab.up(spec, check=True).started) == {"producer-0", "consumer-0"}


def test_swap_and_rollback_leave_it_where_it_is(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(machine_with("cuda", 0, 1), cpus=2)
    monkeypatch.setattr(swap, "facts_here", _with_gpus(found))
    own.lab.up(own.spec(model="tiny"), check=True)
    lines = own.lab.lines.append
    swapped = swap_stack(own.lab.home, "pdkit", SwapTo("cuda"), lines)
    assert swapped.check is not None
    assert swapped.check.passed
    assert swapped.kept == ("router",)
    assert stack_status(own.lab.home, "pdkit").healthy
    own.stops()
    pids = own.pids()
    with pytest.raises(RedisUnreachable):
        roll_back(own.lab.home, "pdkit", report=lines)
    assert own.pids() == pids, "nothing was stopped for it"


def _with_gpus(inventory: Inventory) -> Callable[..., Facts]:
    def facts(spec: Any, home: Any, report: Any) -> Facts:
        found = facts_here(spec.model_copy(update={"vendor": "cpu"}), home, report)
        return replace(found, inventory=inventory, vendor=spec.vendor)

    return facts


class TestWhatTheFileHolds:
    """Refused before anybody is asked."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "url"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("http://cache", "unsupported scheme http://"),
            ("my-password", "does not contain a Redis URL: no scheme"),
            ("redis://:my-password@cache:port", "the redis:// URL in .* is invalid"),
            ("redis://:my password@cache", "is invalid"),
            ("redis://:my-'password@cache", "is invalid"),
            ("redis://:my-pässword@cache", "is invalid"),
            ("redis://:my/password@cache", "is invalid"),
            ("redis://:my-password@cache?nonsense=1", "is invalid"),
            ("redis://:my-password@cache\nredis://:my-password@cache", "is invalid"),
            ("redis-sentinel://:my-password@cache", "is invalid"),
        ],
    )
    def test_an_invalid_url_file_is_refused(
        self, prepared: Callable[..., Prepared], file: Path, text: str, words: str
    ) -> None:
        file.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            redis_url(prepared(redis={"url_file": str(file)}))
        said = caught.value.message + caught.value.hint
        assert caught.value.message.startswith("redis.url_file: ")
        assert str(file) in said
        assert "my" not in said.replace(str(file), "")

    @pytest.mark.parametrize(
        "url",
        [
            "redis-sentinel://:my-password@one/main", "rediss-sentinel://:my-password@one/main",
            "redis-cluster://:my-password@one", "rediss-cluster://:my-password@one",
            "rediss://:my-password@one", "unix://:my-password@/run/redis.sock",
        ],
    )  # fmt: skip
    def test_lmcaches_client_is_supported_with_one_plain_redis_only(
        self, prepared: Callable[..., Prepared], file: Path, url: str
    ) -> None:
        scheme = url.partition(":")[0]
        file.write_text(url)
        made = prepared(redis={"url_file": str(file), "client": "lmcache"})
        with pytest.raises(ConfigError, match=r"^redis\.client: lmcache ") as caught:
            redis_url(made)
        said = caught.value.message + caught.value.hint
        assert f"has a {scheme}:// URL" in said
        assert "leave redis.client out of deploy.yaml" in said
        assert "my-password" not in said
        file.write_text("redis://one")
        assert redis_url(made) == "redis://one"


class TestContainers:
    """What leads nowhere from inside one is refused."""

    @pytest.fixture
    def make(self, prepared: Callable[..., Prepared], tmp_path: Path) -> Callable[..., Prepared]:
        def made(url: str, *tls_files: Path) -> Prepared:
            (tmp_path / "url").write_text(url)
            redis = {"url_file": str(tmp_path / "url"), "tls_files": [*map(str, tls_files)]}
            return prepared(runtime="compose", redis=redis)

        return made

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("unix:///run/redis.sock", "unix:///run/redis.sock is a socket of this machine"),
            ("redis://", "redis://localhost:6379 means the container itself"),
            ("redis://:secret@127.0.0.1:7000", "127.0.0.1:7000 means the container itself"),
            ("redis-cluster://cache,[::1]:7000", "means the container itself"),
            ("rediss://cache?ssl_ca_certs=/etc/ca.pem", "its URL names /etc/ca.pem"),
        ],
    )
    def test_urls_that_containers_cannot_reach_are_refused(
        self, make: Callable[..., Prepared], url: str, words: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            redis_url(make(url))
        assert words in caught.value.message
        assert "secret" not in caught.value.message
        assert "--runtime process" in caught.value.hint or "tls_files" in caught.value.hint

    def test_urls_that_containers_can_reach_are_accepted(
        self, make: Callable[..., Prepared], tmp_path: Path
    ) -> None:
        file = tmp_path / "ca.pem"
        file.write_text("-")
        file.chmod(0o644)
        url = f"rediss://:word@cache.example:7000/1?ssl_ca_certs={file}"
        assert redis_url(make(url, file)) == url

    def test_files_that_their_user_cannot_read(
        self, make: Callable[..., Prepared], tmp_path: Path
    ) -> None:
        file = tmp_path / "key.pem"
        with pytest.raises(ConfigError, match=r"redis\.tls_files: .* is not a file"):
            redis_url(make("rediss://cache", file))
        file.write_text("-")
        file.chmod(0o600)
        made = make("rediss://cache", file)
        found = file.stat()
        assert isinstance(made.facts.software, Containers)
        for user, fits in ((f"{found.st_uid}:5", True), (f"{found.st_uid + 1}:5", False)):
            software = replace(made.facts.software, user=user)
            with _refused_unless(fits, match="cannot be read by user"):
                redis_url(replace(made, facts=replace(made.facts, software=software)))

    def test_a_cluster_that_calls_its_servers_by_loopback(
        self, make: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is in the URL can be reached; what its servers call themselves cannot."""
        made = make("redis-cluster://cache.example")
        monkeypatch.setattr(UrlStore, "trouble", lambda _: "")
        for hosts, fits in ((("10.0.0.1", "10.0.0.2"), True), (("10.0.0.1", "127.0.0.1"), False)):
            monkeypatch.setattr(UrlStore, "server_names", lambda _, hosts=hosts: hosts)
            with _refused_unless(fits, match="names a server 127.0.0.1"):
                user_redis.require_redis(made, tmp_path / "secrets")


@contextmanager
def _refused_unless(fits: bool, *, match: str) -> Iterator[None]:
    if fits:
        yield
        return
    with pytest.raises(ConfigError, match=match):
        yield
