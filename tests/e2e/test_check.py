"""`check` on a real stack that keeps what it decodes: all it asks, beside others, and killed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
import redis

from deploy.runtime.engine_api import EngineApi
from deploy.runtime.home import Home
from tests.e2e.conftest import Deploy, eventually, running_stack
from tests.e2e.traffic import MODEL, text
from tests.ports import free_row

NAME = "checked"
PORT = free_row()


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    return Deploy(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module", autouse=True)
def stack(kit: Deploy) -> Iterator[None]:
    # The first test checks it.
    with running_stack(kit, NAME, PORT, "--save-decode-cache", "--no-check"):
        yield


@pytest.fixture
def store(kit: Deploy) -> redis.Redis:
    return kit.redis(NAME)


def requests(kit: Deploy) -> int:
    """Return how many requests the engines have finished."""
    key = kit.engine_key(NAME)
    with (
        EngineApi(engine(10), api_key=key) as producer,
        EngineApi(engine(11), api_key=key) as consumer,
    ):
        return producer.finished_requests() + consumer.finished_requests()


def engine(offset: int) -> str:
    return f"http://127.0.0.1:{PORT + offset}"


def files(kit: Deploy) -> set[str]:
    """Return what there is but logs, and locks, which stop nobody once their holder is dead."""
    left_out = (".log", ".lock", ".turn")
    return {str(p) for p in kit.home.rglob("*") if p.is_file() and p.suffix not in left_out}


@contextmanager
def others() -> Iterator[list[int]]:
    """Chat through the router, with prompts of whole chunks; yields the statuses of answers."""
    stop, statuses = threading.Event(), list[int]()

    def chat(user: int) -> None:
        turn = 0
        while not stop.wait(0.1):
            body = {"model": MODEL, "prompt": text(600, ("others", user, turn)), "max_tokens": 8}
            url = f"http://127.0.0.1:{PORT}/v1/completions"
            statuses.append(httpx.post(url, json=body, timeout=60, trust_env=False).status_code)
            turn += 1

    users = [threading.Thread(target=chat, args=(n,)) for n in range(2)]
    for user in users:
        user.start()
    try:
        yield statuses
    finally:
        stop.set()
        for user in users:
            user.join()


def test_a_whole_check_passes_and_leaves_its_canary_only(kit: Deploy, store: redis.Redis) -> None:
    before, kept, finished = set(store.keys()), files(kit), requests(kit)
    ran = kit.run("check", "--name", NAME, "--json")
    assert ran.code == 0, ran
    assert requests(kit) - finished < 200, "it takes seconds"
    data = ran.data
    assert data["hit_rate"]["eligible_rate"] == 1.0
    for phase in ("store_race", "turns", "decode_reuse", "burst"):
        assert data[phase]["hits"] == data[phase]["eligible"] > 0, phase
        assert not data[phase]["blurred"], phase
    assert data["decode_reuse"]["eligible"] == 2 * 256, "half of the second chunk was decoded"
    assert data["burst"]["requests"] >= 16 and data["burst"]["failed"] == 0
    # Each pair's prompts and cuts, the router's, the turns', the follow-up of what was decoded,
    # and every user's.
    assert data["equivalence"]["compared"] == (2 + 16) + 2 + 3 + 1 + 8
    assert data["counted"] == {
        "queries": data["hit_rate"]["queries"] + data["counted"]["queries"] - 1621,
        "hits": data["hit_rate"]["hits"],
        "local_hits": data["counted"]["local_hits"],
        "others": 0,
    }
    assert data["redis"]["keys_removed"] > 30
    left = set(store.keys()) - before
    assert set(store.keys()) >= before, "nothing else is gone"
    assert len(left) == 2 and all(b"%canary-" in key for key in left), "two chunks for later checks"
    assert {Path(file).parent.name for file in files(kit) - kept} <= {"canaries"}


def test_a_quick_check_skips_the_long_parts(kit: Deploy) -> None:
    data = kit.ok("check", "--name", NAME, "--quick", "--pairs", "producer-0:*")
    assert len(data["pairs"]) == 1
    assert data["turns"] is data["decode_reuse"] is data["burst"] is None


def test_pairs_that_do_not_exist_are_refused(kit: Deploy) -> None:
    ran = kit.run("check", "--name", NAME, "--pairs", "producer-7:*")
    assert ran.code == 2
    assert "producer-7:*" in ran.stderr and "producer-0:consumer-0" in ran.stderr


def test_a_repeated_check_writes_junit_xml(kit: Deploy, tmp_path: Path) -> None:
    found = tmp_path / "found.xml"
    data = kit.ok("check", "--name", NAME, "--quick", "--repeat", "3", "--junit", str(found))
    assert (data["runs"], data["runs_passed"], data["passed"]) == (3, 3, True)
    suites = ElementTree.fromstring(found.read_bytes())  # noqa: S314 - our own
    assert [suite.attrib["failures"] for suite in suites] == ["0", "0", "0"]
    lost = kit.run("check", "--name", NAME, "--junit", str(tmp_path / "no" / "found.xml"))
    assert lost.code == 2 and "mkdir" in lost.stderr


def test_a_check_passes_while_others_use_the_stack(kit: Deploy, store: redis.Redis) -> None:
    """Pairs are judged to the token all the same; what others blur is said; their keys stay."""
    with others() as statuses:
        assert eventually(lambda: len(statuses) > 4)
        ran = kit.run("check", "--name", NAME, "--json")
        assert ran.code == 0, ran
        text_ran = kit.run("check", "--name", NAME, "--quick")
    assert ran.data["others_requests"] > 0
    assert ran.data["hit_rate"]["eligible_rate"] == 1.0
    assert ran.data["equivalence"]["mismatched"] == 0
    assert "requests were served meanwhile" in text_ran.stdout
    assert set(statuses) == {200}
    assert not any(b"%check-" in key for key in store.scan_iter())
    assert store.dbsize() >= 2 * len(statuses), "nobody else's keys were removed"


@pytest.mark.parametrize("when", ["locked", "first key", "→ consumer-0: ", "a conversation of "])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_check_leaves_no_keys(
    kit: Deploy, store: redis.Redis, how: signal.Signals, when: str
) -> None:
    """Once its lock or its first key is there, or once it has said that a part of it is done."""
    before, kept = set(store.keys()), files(kit)
    state = kit.state(NAME)
    process = kit.start("check", "--name", NAME)
    if when == "locked":
        lock = Home(kit.home, kit.home).lock_file(NAME)
        assert eventually(lock.exists)
    elif when == "first key":
        assert eventually(lambda: set(store.keys()) - before)
    else:
        assert process.stderr is not None
        assert any(when in line for line in process.stderr)
    process.send_signal(how)
    process.communicate(timeout=60)
    # Engines finish what they were asked for, and the clean-up of keys waits for that.
    assert eventually(lambda: kit.guards() == 0)
    assert files(kit) == kept
    assert set(store.keys()) == before
    assert kit.state(NAME) == state


def test_the_stack_still_serves_after_all_checks(kit: Deploy) -> None:
    """After all of that."""
    data: Any = kit.ok("check", "--quick", "--name", NAME)
    assert data["passed"]
    assert [engine["restarts"] for engine in data["engines"]] == [0, 0]
