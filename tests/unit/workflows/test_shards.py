"""A stack whose keys lie on two Redis: up, checked, watched, half dead, up again, down."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
import redis

from deploy.errors import StackUnhealthy
from deploy.workflows.check import check_stack
from deploy.workflows.down import stop_stack
from deploy.workflows.running import require_stack, store_of
from deploy.workflows.status import stack_status
from deploy.workflows.watch import StackWatch
from tests.unit.workflows.conftest import Lab, opened

SHARDS = ("redis-0", "redis-1")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with opened(tmp_path_factory.mktemp("shards")) as made:
        redis_spec = {"memory_gib": 0.1, "shards": 2}
        made.up(made.spec(redis=redis_spec), check=True)
        yield made
        stop_stack(made.home, "pdkit", made.lines.append)
        assert made.pids() == []
        assert made.files() == []


def keys(lab: Lab) -> list[set[bytes]]:
    """Return the keys of each shard."""
    running = require_stack(lab.home, "pdkit")
    password = running.secrets["redis_password"].reveal()
    found = []
    for shard in running.stack.redis:
        with redis.Redis(unix_socket_path=shard.socket, password=password) as client:
            found.append(set(client.keys()))
    return found


def kill(lab: Lab, name: str) -> None:
    process = psutil.Process(require_stack(lab.home, "pdkit").state.services[name].pid)
    process.kill()
    process.wait(10)


def test_check_passes_and_leaves_its_canary_only(lab: Lab) -> None:
    before = set.union(*keys(lab))
    assert check_stack(lab.home, "pdkit", lab.lines.append).passed
    left = set.union(*keys(lab)) - before
    assert len(left) == 2 and all(b"canary-" in key for key in left)


def test_status_counts_what_lies_on_both(lab: Lab) -> None:
    before = sum(map(len, keys(lab)))
    lab.ask()
    first, second = keys(lab)
    assert len(first | second) == len(first) + len(second) == before + 3
    status = stack_status(lab.home, "pdkit")
    assert status.healthy
    assert [one.name for one in status.services if one.role == "redis"] == list(SHARDS)
    assert status.store is not None
    assert status.store.keys == before + 3
    assert status.store.max_memory_bytes == 2 * 51 * 2**20


@pytest.mark.parametrize("name", SHARDS)
def test_a_dead_shard_is_named_and_started_again(lab: Lab, name: str) -> None:
    watch = StackWatch(lab.home, "pdkit")
    assert watch.frame().sick == []
    kill(lab, name)
    status = stack_status(lab.home, "pdkit")
    assert (status.sick, status.store) == ([name], None)
    frame = watch.frame()
    assert frame.sick == [name]
    assert [(event.kind, event.about) for event in frame.events] == [("exited", name)]
    with pytest.raises(StackUnhealthy, match=f"not running: {name}"):
        check_stack(lab.home, "pdkit", lab.lines.append)
    before = dict(require_stack(lab.home, "pdkit").state.services)
    up = lab.up(require_stack(lab.home, "pdkit").prepared.spec)
    assert up.started.keys() == {name}
    assert up.outlived_store
    after = require_stack(lab.home, "pdkit").state.services
    assert {one for one in after if after[one].pid != before[one].pid} == {name}
    with store_of(require_stack(lab.home, "pdkit")) as store:
        assert store.stats()
    assert check_stack(lab.home, "pdkit", lab.lines.append).passed
