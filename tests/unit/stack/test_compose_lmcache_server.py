"""LMCache's server in containers: who shares memory with it, and who reaches it by which way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import ConfigError
from deploy.runtime.home import Home
from deploy.workflows.prepare import prepare
from tests.unit.conftest import KIT
from tests.unit.stack.cases import machine_with
from tests.unit.stack.conftest import Case

Make = Callable[..., Case]
MP = {"vendor": "cpu", "connector": "lmcache-mp"}
SHARED = "/dev/shm"


def mounted(service: dict[str, Any], target: str) -> list[dict[str, Any]]:
    return [mount for mount in service.get("volumes", []) if mount["target"] == target]


def mib(text: str) -> int:
    return int(text.removesuffix("m"))


@pytest.fixture(scope="module")
def made(contained: Make) -> Case:
    return contained(topology="2p2d", engine={"kv_cache_gib": 1}, redis={"shards": 1}, **MP)


def test_engines_and_the_server_share_one_memory_and_nobody_else_has_it(made: Case) -> None:
    ((name, volume),) = made.document["volumes"].items()
    sharing = {name for name, service in made.services.items() if mounted(service, SHARED)}
    assert sharing == {"kv-server", *made.engines}
    for service in (made.services[one] for one in sharing):
        (mount,) = mounted(service, SHARED)
        assert mount == {
            "type": "volume", "source": name, "target": SHARED, "volume": {"nocopy": True},
        }  # fmt: skip
        assert "shm_size" not in service
        assert service["user"] == "1000:1000"
    options = volume["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    assert {"mode=0700", "uid=1000", "gid=1000", "nosuid", "nodev", "noexec"} <= set(
        options["o"].split(",")
    )


def test_shared_memory_holds_the_kv_of_all_engines_and_of_a_restarted_one(made: Case) -> None:
    (volume,) = made.document["volumes"].values()
    (size,) = (part for part in volume["driver_opts"]["o"].split(",") if part.startswith("size="))
    assert mib(size.removeprefix("size=")) >= 5 * 1024 + 4 * 64, "64 MiB are Docker's own default"


def test_another_size_is_another_memory(made: Case, contained: Make) -> None:
    """Docker keeps the options of a volume that is there."""
    larger = contained(topology="2p2d", engine={"kv_cache_gib": 2}, redis={"shards": 1}, **MP)
    assert made.document["volumes"].keys() != larger.document["volumes"].keys()


def test_containers_have_their_own_shared_memory_without_the_server(contained: Make) -> None:
    plain = contained(vendor="cpu")
    assert "volumes" not in plain.document
    assert all(service["shm_size"] for service in plain.services.values())


def test_only_this_machine_reaches_the_servers_pages(made: Case) -> None:
    server = made.services["kv-server"]
    assert "ports" not in server
    (folder,) = mounted(server, "/run/pdkit-kv")
    assert folder["source"].startswith(f"{made.prepared_root}/run/kv-server/")
    assert folder["read_only"] is False
    for name in made.services.keys() - {"kv-server"}:
        assert not mounted(made.services[name], "/run/pdkit-kv"), name
    service = made.prepared.stack.service("kv-server")
    requests, pages = service.argv[3:5]
    assert service.url == f"unix://{folder['source']}/{pages.rpartition('/')[2]}"
    assert pages.startswith("/run/pdkit-kv/")
    assert requests.startswith(f"{SHARED}/")
    assert any(pages in part for part in server["healthcheck"]["test"])


def test_engines_do_not_reach_redis(made: Case) -> None:
    assert made.services["kv-server"]["networks"] == ["store"]
    for engine in made.engines.values():
        assert engine["networks"] == ["front"]
        assert {one["source"] for one in engine["secrets"]} == {"engine_key"}


def test_prometheus_reaches_its_metrics_and_nothing_else_does(made: Case, contained: Make) -> None:
    watched = contained(monitoring=True, **MP).services["kv-server"]
    assert watched["networks"] == ["store", "front"]
    assert watched["environment"]["PDKIT_METRICS_ADDRESS"] == "0.0.0.0:9000"
    assert "ports" not in watched
    assert "PDKIT_METRICS_ADDRESS" not in made.services["kv-server"]["environment"]


def test_the_users_own_redis_is_reached_from_the_other_network(contained: Make) -> None:
    own = {"url_file": "/home/user/redis-url", "tls_files": ["/home/user/ca.pem"]}
    made = contained(redis=own, **MP)
    assert made.services["kv-server"]["networks"] == ["front"]
    assert mounted(made.services["kv-server"], "/home/user/ca.pem")
    assert not mounted(made.services["producer-0"], "/home/user/ca.pem")


def test_only_the_server_gets_the_key_of_a_mac(contained: Make) -> None:
    services = contained(redis={"integrity": "mac"}, **MP).services
    holders = {
        name
        for name, service in services.items()
        if "kv_key" in {secret["source"] for secret in service["secrets"]}
    }
    assert holders == {"kv-server"}


def test_the_servers_memory_limit_is_above_its_use(made: Case) -> None:
    limit = made.services["kv-server"]["deploy"]["resources"]["limits"]["memory"]
    assert made.prepared.plan.kv_server
    assert mib(limit) > made.prepared.plan.kv_server.memory_mib


def test_a_folder_that_leaves_no_room_for_a_socket_is_refused(made: Case) -> None:
    def socket_in(folder: str) -> str:
        home, was = Home(Path(folder), Path("/cache")), made.prepared
        again = prepare(was.spec, home, was.facts, model=was.model, kit=KIT)
        return again.stack.service("kv-server").socket

    longest = "/" + "h" * (107 - 1 - len(socket_in("/")))
    assert len(socket_in(longest)) == 107
    with pytest.raises(ConfigError, match="longer than 107 bytes") as caught:
        socket_in(f"{longest}h")
    hint = caught.value.hint_for("plan")
    assert hint == "deploy plan --connector lmcache, or PDKIT_HOME=/A/SHORTER/FOLDER"


@pytest.fixture(scope="module")
def on_gpus(contained: Make) -> Case:
    return contained(
        vendor="cuda", connector="lmcache-mp", topology="2p2d", gpus=4,
        machine=machine_with("cuda", 1, 2, 4, 7), redis={"shards": 1},
    )  # fmt: skip


class TestOnGpus:
    def test_the_server_has_the_gpus_of_all_engines_and_an_engine_its_own(
        self, on_gpus: Case
    ) -> None:
        given = {
            name: service["deploy"]["resources"]["reservations"]["devices"][0]
            for name, service in on_gpus.services.items()
            if "reservations" in service["deploy"]["resources"]
        }
        ids = {name: device["device_ids"] for name, device in given.items()}
        assert ids.pop("kv-server") == ["1", "2", "4", "7"]
        assert sorted(ids.values()) == [["1"], ["2"], ["4"], ["7"]]
        assert {device["driver"] for device in given.values()} == {"nvidia"}

    def test_a_gpu_server_may_pin_memory(self, on_gpus: Case, made: Case) -> None:
        assert on_gpus.services["kv-server"]["ulimits"] == {"memlock": {"soft": -1, "hard": -1}}
        assert "ulimits" not in made.services["kv-server"]

    def test_no_namespace_is_shared_and_no_right_is_added(self, on_gpus: Case) -> None:
        for name, service in on_gpus.services.items():
            assert not {"ipc", "pid", "network_mode", "privileged", "cap_add"} & service.keys(), (
                name
            )
            assert service["cap_drop"] == ["ALL"]
            assert "devices" not in service

    def test_they_share_one_memory_for_events(self, on_gpus: Case) -> None:
        sharing = {name for name, one in on_gpus.services.items() if mounted(one, SHARED)}
        assert sharing == {"kv-server", *on_gpus.engines}
        (volume,) = on_gpus.document["volumes"].values()
        # Two GiB an engine, as each has without the server; KV is on the GPUs.
        assert f"size={4 * 2048}m" in volume["driver_opts"]["o"].split(",")

    def test_process_numbers_of_containers_do_not_overlap(self, on_gpus: Case, made: Case) -> None:
        numbers = {
            name: tuple(map(int, service["environment"]["PDKIT_PROCESS_NUMBERS"].split("-")))
            for name, service in on_gpus.services.items()
            if "PDKIT_PROCESS_NUMBERS" in service.get("environment", {})
        }
        assert numbers.keys() == {"kv-server", *on_gpus.engines}
        assert numbers["kv-server"][0] == 1, "its own process is among a container's first"
        ordered = sorted(numbers.values())
        for (_, last), (first, _) in itertools.pairwise(ordered):
            assert last < first
        assert all(last - first >= 2000 for first, last in ordered)
        for service in made.services.values():
            assert "PDKIT_PROCESS_NUMBERS" not in service.get("environment", {}), "for GPUs only"

    def test_engines_still_do_not_reach_redis(self, on_gpus: Case) -> None:
        for engine in on_gpus.engines.values():
            assert engine["networks"] == ["front"]
            assert {one["source"] for one in engine["secrets"]} == {"engine_key"}

    def test_a_gpu_server_has_the_image_whose_pair_works(self, on_gpus: Case) -> None:
        images = {
            one["image"] for one in (on_gpus.services["kv-server"], *on_gpus.engines.values())
        }
        assert images == {"pdkit/vllm-cuda:0.32.0-lmcache0.5.6"}
