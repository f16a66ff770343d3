"""What holds of every Compose document, whatever was asked for.

Each test goes through all of vendors, topologies and options; the case's name is in the failure.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.config.vendors import VENDORS
from deploy.errors import ConfigError
from deploy.planning.inventory import Inventory
from deploy.stack.document import document_yaml
from tests.golden_documents import read
from tests.unit.stack.cases import FOLDER_MODEL, OPTIONS, TOKEN, machine_with
from tests.unit.stack.conftest import Case

Make = Callable[..., Case]
MONITORING = ("prometheus", "grafana")

FOREIGN = {
    "cuda": ("rocm", "hip_", "/dev/kfd", "/dev/dri", "amd.com", "seccomp"),
    "rocm": ("nvidia", "cuda"),
    "cpu": ("nvidia", "cuda", "rocm", "hip_", "/dev/", "seccomp"),
}
UNESCAPED = re.compile(r"(?<!\$)(?:\$\$)*\$(?!\$)")


def texts(value: Any) -> list[str]:
    """Return every text in a document, keys among them."""
    found, left = list[str](), [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            found += map(str, one)
            left += one.values()
        elif isinstance(one, list):
            left += one
        else:
            found.append(str(one))
    return found


def devices(service: dict[str, Any]) -> list[str]:
    """Return what a service is given of GPUs, by whatever way."""
    resources = service["deploy"]["resources"]
    reserved = resources.get("reservations", {}).get("devices", [])
    named = [name for name in service.get("devices", []) if name != "/dev/kfd"]
    return [*named, *(own for one in reserved for own in one["device_ids"])]


class TestVendors:
    def test_no_stack_names_another_vendor(self, cases: list[Case]) -> None:
        for case in cases:
            # That memory is no vendor's device.
            said = " ".join(texts(case.document)).lower().replace("/dev/shm", "")
            # The connector's and the user's words are no vendor's.
            for word in FOREIGN[case.vendor]:
                assert word not in said, (case.name, word)

    def test_the_rule_finds_a_foreign_name(self, contained: Make) -> None:
        said = " ".join(texts(contained(vendor="rocm").document)).lower()
        assert [word for word in FOREIGN["cpu"] if word in said] == [
            "rocm", "hip_", "/dev/", "seccomp",
        ]  # fmt: skip

    def test_an_engine_image_is_its_vendors(self, cases: list[Case]) -> None:
        for case in cases:
            own = case.fields.get("image") or f"pdkit/vllm-{case.vendor}:"
            for engine in case.engines.values():
                assert engine["image"].startswith(own), case.name

    def test_processors_need_no_device(self, cases: list[Case]) -> None:
        for case in cases:
            for engine in case.engines.values():
                assert bool(devices(engine)) is (case.vendor != "cpu"), case.name
                assert "group_add" not in engine or case.vendor == "rocm", case.name
            for name in case.services.keys() - case.engines.keys() - {"kv-server"}:
                assert devices(case.services[name]) == [], (case.name, name)

    def test_rights_beyond_none_are_only_rocms(self, cases: list[Case]) -> None:
        for case in cases:
            for name, service in case.services.items():
                rocm_engine = case.vendor == "rocm" and name in case.engines
                filters = [text for text in service["security_opt"] if "seccomp" in text]
                own = [f"seccomp={case.prepared_root}/seccomp-rocm.json"]
                assert filters == (own if rocm_engine else []), (case.name, name)
                assert "cap_add" not in service, (case.name, name)

    def test_cuda_and_rocm_differ_in_nothing_but_the_vendors_rows(self, contained: Make) -> None:
        engine = r"services\.(?:producer|consumer)-\d\."
        allowed = re.compile(
            rf"{engine}(?:image|devices|group_add|cap_add|security_opt"
            r"|deploy\.resources\.reservations|labels\.dev\.pdkit\.service"
            r"|environment\.(?:HIP_VISIBLE_DEVICES|PYTHONHASHSEED))"
            # The namespace of their KV, which is another as the image is.
            r"|x-pdkit\.files\..*/lmcache\.yaml"
        )
        for fields in ({}, {"topology": "2p2d", "layerwise": True}, {"tp": 2}, {"gpus": 1}):
            one, other = (contained(vendor=vendor, **fields) for vendor in ("cuda", "rocm"))
            changed = list(differing(one_cache(one.document), one_cache(other.document)))
            assert changed
            assert [path for path in changed if not allowed.fullmatch(path)] == []
            for name, text in one.document["x-pdkit"]["files"].items():
                theirs = other.document["x-pdkit"]["files"][name].splitlines()
                lines = zip(text.splitlines(), theirs, strict=True)
                assert all(a == b or "pdkit.namespace: " in a for a, b in lines), name

    def test_the_variable_of_visible_gpus_counts_a_containers_own(self, cases: list[Case]) -> None:
        for case in cases:
            ranks = case.prepared.plan.tp
            for engine in case.engines.values():
                seen = engine["environment"].get("HIP_VISIBLE_DEVICES")
                expected = ",".join(map(str, range(ranks))) if case.vendor == "rocm" else None
                assert seen == expected, case.name


def one_cache(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document in which every image's engines keep their caches in the same folder."""
    text = re.sub(r"(?<=/pdkit/engines/)[0-9a-f]{16}", "IMAGE", json.dumps(document))
    return dict(json.loads(text))


def differing(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two documents differ, each as deep as both have its folder."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if key not in one or key not in other:
                yield f"{path}{key}"
            else:
                yield from differing(one[key], other[key], f"{path}{key}.")
    elif one != other:
        yield path.removesuffix(".")


class TestGpus:
    def test_each_is_given_once_unless_the_plan_shares_it(self, cases: list[Case]) -> None:
        for case in cases:
            given = Counter(own for engine in case.engines.values() for own in devices(engine))
            if case.prepared.plan.shares_gpus:
                assert list(given.values()) == [len(case.engines)], case.name
            else:
                assert set(given.values()) <= {1}, case.name

    def test_an_engine_has_one_for_each_rank(self, cases: list[Case]) -> None:
        for case in cases:
            for engine in case.engines.values():
                ranks = case.prepared.plan.tp if case.vendor != "cpu" else 0
                assert len(devices(engine)) == ranks, case.name

    @pytest.mark.parametrize("indices", [(0, 1), (2, 3), (1, 5), (0, 1, 2, 3, 4, 5, 6, 7)])
    def test_gpus_are_given_by_the_vendors_indices(
        self, contained: Make, indices: tuple[int, ...]
    ) -> None:
        cuda = contained(machine=machine_with("cuda", *indices), gpus=len(indices))
        given = [devices(engine) for engine in cuda.engines.values()]
        assert given == [[str(index)] for index in indices]
        rocm = contained(vendor="rocm", machine=machine_with("rocm", *indices), gpus=len(indices))
        given = [devices(engine) for engine in rocm.engines.values()]
        assert given == [[f"/dev/dri/renderD{128 + 8 * index}"] for index in indices]

    def test_cuda_reserves_them_of_the_driver(self, contained: Make) -> None:
        made = contained(machine=machine_with("cuda", 4, 5, 6, 7), gpus=4, tp=2)
        reserved = made.services["consumer-0"]["deploy"]["resources"]["reservations"]["devices"]
        assert reserved == [{"driver": "nvidia", "device_ids": ["6", "7"], "capabilities": ["gpu"]}]

    def test_rocm_gets_nodes_and_the_groups_that_own_them(self, contained: Make) -> None:
        made = contained(vendor="rocm", machine=machine_with("rocm", 0, 1))
        engine = made.services["consumer-0"]
        assert engine["devices"] == ["/dev/kfd", "/dev/dri/renderD136"]
        assert engine["group_add"] == ["44", "993"]
        assert "reservations" not in engine["deploy"]["resources"]

    @pytest.mark.parametrize(
        ("here", "asked", "cdi"),
        [
            ((), "auto", False),
            (("nvidia",), "auto", False),
            (("nvidia", "nvidia.com/gpu"), "auto", False),
            (("nvidia.com/gpu",), "auto", True),
            (("amd.com/gpu",), "auto", False),
            (("nvidia.com/gpu",), "runtime", False),
            (("nvidia",), "cdi", True),
            ((), "cdi", True),
        ],
    )
    def test_device_interface_where_the_driver_is_missing_or_it_is_asked_for(
        self, contained: Make, here: tuple[str, ...], asked: str, cdi: bool
    ) -> None:
        machine = machine_with("cuda", 0, 1, container_gpus=here)
        engine = contained(machine=machine, gpu_access=asked).services["consumer-0"]
        assert "devices" not in engine, "of which an older Compose takes the names for paths"
        assert devices(engine) == (["nvidia.com/gpu=1"] if cdi else ["1"])
        (reserved,) = engine["deploy"]["resources"]["reservations"]["devices"]
        assert reserved["driver"] == ("cdi" if cdi else "nvidia")

    @pytest.mark.parametrize("here", [(), ("amd.com/gpu",)])
    def test_rocms_nodes_need_no_interface(self, contained: Make, here: tuple[str, ...]) -> None:
        machine = machine_with("rocm", 0, 1, container_gpus=here)
        for asked in ("auto", "runtime"):
            made = contained(vendor="rocm", machine=machine, gpu_access=asked)
            engine = made.services["producer-0"]
            assert engine["devices"] == ["/dev/kfd", "/dev/dri/renderD128"]
        made = contained(vendor="rocm", machine=machine, gpu_access="cdi")
        assert devices(made.services["producer-0"]) == ["amd.com/gpu=0"]

    def test_rocm_engines_can_have_all_nodes_and_their_own_indices(self, contained: Make) -> None:
        machine = machine_with("rocm", 0, 1, 2, 3)
        made = contained(vendor="rocm", machine=machine, gpus=4, tp=2, gpu_access="all")
        engine = made.services["consumer-0"]
        assert engine["devices"] == ["/dev/kfd", "/dev/dri"]
        assert engine["environment"]["HIP_VISIBLE_DEVICES"] == "2,3"

    @pytest.mark.parametrize("vendor", ["cuda", "cpu"])
    def test_only_rocm_can_have_all_nodes(self, contained: Make, vendor: str) -> None:
        with pytest.raises(ConfigError, match="gpu_access: 'all' works only with ROCm"):
            contained(vendor=vendor, gpu_access="all")


class TestRights:
    def test_every_service_is_held_in(self, cases: list[Case]) -> None:
        for case in cases:
            for name, service in case.services.items():
                where = (case.name, name)
                assert service["cap_drop"] == ["ALL"], where
                assert "no-new-privileges:true" in service["security_opt"], where
                assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), where
                limits = service["deploy"]["resources"]["limits"]
                assert re.fullmatch(r"[1-9]\d*m", limits["memory"]), where
                assert 0 < limits["pids"] <= 32768, where
                assert service["logging"]["options"]["max-size"], where
                assert service["logging"]["options"]["max-file"], where
                assert service["restart"] == "unless-stopped", where
                assert service["healthcheck"]["test"][0] == "CMD", where
                assert service["init"] is True, where
                assert service["pull_policy"] == "never", where
                assert service["labels"].keys() == {
                    f"dev.pdkit.{own}" for own in ("stack", "role", "root", "service")
                }, where
                for way in ("privileged", "network_mode", "pid", "ipc", "userns_mode", "env_file"):
                    assert way not in service, where

    def test_files_of_the_kit_are_mounted_read_only(self, cases: list[Case]) -> None:
        for case in cases:
            for name, service in case.services.items():
                for mount in service.get("volumes", []):
                    if mount["type"] == "volume":  # test_compose_lmcache_server.py
                        continue
                    is_written = mount["target"] in ("/hub", "/cache", "/data", "/run/pdkit-kv")
                    assert mount["read_only"] is not is_written, (case.name, name)
                    assert mount["type"] == "bind"

    def test_only_the_cache_of_a_hub_model_is_writable(self, cases: list[Case]) -> None:
        for case in cases:
            from_hub = case.prepared.model.source == "hub"
            for engine in case.engines.values():
                targets = [mount["target"] for mount in engine["volumes"]]
                assert ("/hub" in targets) is from_hub, case.name
                assert (engine["environment"].get("HF_HUB_OFFLINE") == "1") is not from_hub

    def test_root_file_systems_are_read_only(self, cases: list[Case]) -> None:
        for case in cases:
            for name, service in case.services.items():
                assert service["read_only"] is True, (case.name, name)

    def test_engines_write_only_to_their_caches(self, cases: list[Case]) -> None:
        for case in cases:
            for name, engine in case.engines.items():
                writable = [
                    mount["target"] for mount in engine["volumes"] if not mount.get("read_only")
                ]
                writable += [text.partition(":")[0] for text in engine["tmpfs"]]
                for variable in ("HOME", "TMPDIR", "VLLM_CACHE_ROOT"):
                    place = engine["environment"][variable]
                    assert place.startswith(tuple(writable)), (case.name, name, variable)

    def test_memory_of_an_engine_is_above_what_is_expected(self, cases: list[Case]) -> None:
        for case in cases:
            for engine in case.prepared.plan.engines:
                limit = case.services[engine.name]["deploy"]["resources"]["limits"]["memory"]
                assert int(limit.removesuffix("m")) > engine.memory_mib, case.name

    def test_memory_as_asked(self, contained: Make) -> None:
        made = contained(engine={"memory_gib": 48})
        limits = made.services["producer-0"]["deploy"]["resources"]["limits"]
        assert limits["memory"] == f"{48 * 1024}m"

    def test_redis_has_room_beyond_its_maxmemory(self, contained: Make) -> None:
        made = contained(redis={"memory_gib": 4, "shards": 1})
        limit = made.services["redis"]["deploy"]["resources"]["limits"]["memory"]
        assert int(limit.removesuffix("m")) > 4096 * 5 // 4


def is_redis(name: str) -> bool:
    """Tell whether a service is the kit's Redis, or a shard of it."""
    return name.partition("-")[0] == "redis"


def has_redis(case: Case) -> bool:
    return any(map(is_redis, case.services))


def uses_lmcache_inside(case: Case) -> bool:
    """Tell whether engines reach Redis themselves, and not through LMCache's server."""
    return "kv-server" not in case.services


class TestNetworks:
    def test_services_are_in_their_networks(self, cases: list[Case]) -> None:
        for case in cases:
            for name, service in case.services.items():
                expected = ["store"] if is_redis(name) else ["front"]
                # One that reaches Redis: LMCache's server, or an engine where there is none.
                if name == "kv-server" and has_redis(case):
                    expected = ["store", *(["front"] if "prometheus" in case.services else [])]
                if name in case.engines and has_redis(case) and uses_lmcache_inside(case):
                    expected = ["store", "front"]
                assert service["networks"] == expected, (case.name, name)

    def test_nothing_but_its_containers_reaches_the_store(self, cases: list[Case]) -> None:
        for case in cases:
            if not has_redis(case):
                assert set(case.document["networks"]) == {"front"}, case.name
                continue
            store = case.document["networks"]["store"]
            assert store["internal"] is True
            options = store["driver_opts"]
            assert options["com.docker.network.bridge.inhibit_ipv4"] == "true", case.name
            for name in filter(is_redis, case.services):
                assert "ports" not in case.services[name], case.name

    def test_published_ports_are_unique_and_those_of_the_plan(self, cases: list[Case]) -> None:
        for case in cases:
            ports = [
                int(port["published"])
                for service in case.services.values()
                for port in service.get("ports", [])
            ]
            assert len(ports) == len(set(ports)), case.name
            assert set(ports) == set(case.prepared.plan.ports), case.name

    def test_only_the_router_is_published_beyond_loopback(self, cases: list[Case]) -> None:
        for case in cases:
            bind = case.fields.get("bind", "127.0.0.1")
            for name, service in case.services.items():
                for port in service.get("ports", []):
                    reached = name == "router" and int(port["published"]) == case.prepared.spec.port
                    expected = bind if reached else "127.0.0.1"
                    assert port["host_ip"] == expected, (case.name, name)

    def test_the_router_knows_every_engine_by_name(self, cases: list[Case]) -> None:
        for case in cases:
            said = case.services["router"]["command"]
            roles = ("--producer", "--consumer", "--engine")
            named = [said[at + 1] for at, word in enumerate(said) if word in roles]
            assert named == [f"{name}={name}:8000" for name in case.engines], case.name

    def test_everybody_listens_where_others_reach_it(self, cases: list[Case]) -> None:
        for case in cases:
            for name, service in case.services.items():
                if is_redis(name) or name in ("kv-server", *MONITORING):
                    continue
                command = service["command"]
                assert command[command.index("--host") + 1] == "0.0.0.0"  # noqa: S104 - said
                port = command[command.index("--port") + 1]
                assert port in {str(own["target"]) for own in service["ports"]}, case.name
                assert any(f":{port}/" in part for part in service["healthcheck"]["test"]), name


def held_secret(case: Case) -> str:
    """Return the name of the secret that configuration files hold."""
    return "redis_password" if has_redis(case) else "redis_url"


class TestSecrets:
    def test_the_document_contains_no_secret(self, cases: list[Case]) -> None:
        for case in cases:
            assert TOKEN not in " ".join(texts(case.document)), case.name

    def test_words_of_passwords_are_names_and_paths(self, cases: list[Case]) -> None:
        for case in cases:
            acted_on = {key: part for key, part in case.document.items() if key != "x-pdkit"}
            words = re.findall(r"[\w/.-]*passw[\w/.=:-]*", " ".join(texts(acted_on)), re.IGNORECASE)
            for word in words:
                assert re.fullmatch(r"(\S*/secrets/)?(redis|grafana)_password", word), (
                    case.name,
                    word,
                )

    def test_shown_files_have_a_placeholder_for_the_password(self, cases: list[Case]) -> None:
        for case in cases:
            for path, text in case.document["x-pdkit"]["files"].items():
                if Path(path).parent.name in MONITORING:
                    continue
                passwords = r"^requirepass (.*)$|redis://:(.*)@redis(?:-\d)?:6379$"
                found = re.findall(rf"{passwords}|pdkit.url: '(.*)'$", text, re.M)
                said = {"".join(groups) for groups in found}
                assert said == {f"@{{{held_secret(case)}}}"}, (case.name, path)

    def test_placeholders_stand_only_in_what_is_shown_of_files(self, cases: list[Case]) -> None:
        for case in cases:
            acted_on = {key: part for key, part in case.document.items() if key != "x-pdkit"}
            assert "@{" not in " ".join(texts(acted_on)), case.name
            shown = " ".join(case.document["x-pdkit"]["files"].values())
            of_grafana = {"grafana_password"} if "grafana" in case.services else set()
            held = {held_secret(case), *of_grafana}
            assert set(re.findall(r"@\{(\w+)\}", shown)) == held, case.name

    def test_every_secret_used_is_a_file_that_is_named(self, cases: list[Case]) -> None:
        for case in cases:
            used = {
                secret["source"]
                for service in case.services.values()
                for secret in service.get("secrets", [])
            }
            assert used == set(case.document["secrets"]), case.name
            for secret in case.document["secrets"].values():
                assert set(secret) == {"file"}, case.name
                assert secret["file"].startswith(str(case.prepared_root)), case.name

    def test_each_file_of_a_service_is_its_secret(self, cases: list[Case]) -> None:
        """Configuration that holds the password is one, too."""
        for case in cases:
            for path in case.document["x-pdkit"]["files"]:
                assert path in [s["file"] for s in case.document["secrets"].values()], case.name

    def test_each_service_gets_only_its_secrets(self, contained: Make) -> None:
        made = contained(
            model="owner/name", environ={"HF_TOKEN": TOKEN}, api_key_file="/k", redis={"shards": 1}
        )

        def given(name: str) -> set[str]:
            return {secret["source"] for secret in made.services[name]["secrets"]}

        assert given("redis") == {"redis-redis", "redis_password"}
        assert given("producer-0") == {"producer-0-lmcache", "engine_key", "hf_token"}
        assert given("router") == {"api_key", "engine_key"}

    def test_only_engines_get_the_key_of_a_mac(self, contained: Make) -> None:
        services = contained(redis={"integrity": "mac"}).services
        holders = {
            name
            for name, service in services.items()
            if "kv_key" in {secret["source"] for secret in service["secrets"]}
        }
        assert holders == {"producer-0", "consumer-0"}

    def test_a_token_is_not_asked_for_by_a_model_that_is_here(self, contained: Make) -> None:
        made = contained(given=FOLDER_MODEL, environ={"HF_TOKEN": TOKEN})
        assert "hf_token" not in made.document["secrets"]

    @pytest.mark.parametrize(
        "name",
        [
            "HF_TOKEN",
            "MY_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "DB_PASSWORD",
            "OPENAI_API_KEY",
            "DB_PASS",
            "PRIVATE_KEY",
            "PASSPHRASE",
            "OPENAI_KEY",
            "SSH_KEY",
            "MYSQL_PWD",
            "REDISCLI_AUTH",
            "GITHUB_PAT",
            "WANDB_KEY",
            "AWS_CREDS",
            "MY_JWT",
        ],
    )
    def test_a_secret_in_an_engines_variables_is_refused(self, contained: Make, name: str) -> None:
        with pytest.raises(ConfigError) as caught:
            contained(engine={"env": {name: "hunter2"}})
        assert f"engine.env: {name}" in caught.value.message
        assert "hunter2" not in caught.value.message
        assert caught.value.hint

    def test_a_password_in_a_url_is_refused(self, contained: Make) -> None:
        with pytest.raises(ConfigError) as caught:
            contained(engine={"env": {"HTTPS_PROXY": "http://me:hunter2@proxy.example:3128"}})
        assert "engine.env: HTTPS_PROXY" in caught.value.message
        assert "hunter2" not in caught.value.message
        made = contained(engine={"env": {"HTTPS_PROXY": "http://proxy.example:3128/a:b@c"}})
        assert "HTTPS_PROXY" in made.services["producer-0"]["environment"]

    @pytest.mark.parametrize(
        "name",
        [
            "TOKENIZERS_PARALLELISM",
            "MAX_TOKENS",
            "VLLM_USE_V1",
            "BYPASS_CACHE",
            "KEYBOARD",
            "COMPASS",
            "PWD",
            "XAUTHORITY",
        ],
    )
    def test_other_names_are_accepted(self, contained: Make, name: str) -> None:
        made = contained(engine={"env": {name: "1"}})
        assert made.services["producer-0"]["environment"][name] == "1"


class TestDocument:
    def test_dollars_are_escaped_so_that_nothing_is_filled_in(self, cases: list[Case]) -> None:
        for case in cases:
            for text in texts({key: case.document[key] for key in ("services", "secrets")}):
                assert not UNESCAPED.search(text), (case.name, text)

    def test_the_users_dollars_reach_the_engine(self, contained: Make) -> None:
        made = contained(**OPTIONS["engine"])
        engine = made.services["producer-0"]
        assert engine["environment"]["A"].replace("$$", "$") == "$HOME ${B} $$"
        assert "$$1" in engine["command"]

    def test_dependencies_exist_and_come_before(self, cases: list[Case]) -> None:
        for case in cases:
            seen: set[str] = set()
            for name, service in case.services.items():
                needed = service.get("depends_on", {})
                assert needed.keys() <= seen, (case.name, name)
                assert all(one == {"condition": "service_healthy"} for one in needed.values())
                seen.add(name)

    @pytest.mark.parametrize(
        "given",
        [
            {"gpus": 3},
            {"gpus": 1},
            {"gpus": 1, "model": "owner/new", "engine": {"kv_cache_gib": 4}},
        ],
    )
    def test_engines_start_together(self, contained: Make, given: dict[str, Any]) -> None:
        engines = contained(topology="1p2d", redis={"shards": 1}, **given).engines
        assert all(list(engine["depends_on"]) == ["redis"] for engine in engines.values())

    def test_engines_that_measure_a_gpu_start_one_after_the_other(self, contained: Make) -> None:
        """The size of this model's weights is unknown, so the plan cannot set the KV space."""
        made = contained(gpus=1, topology="1p2d", model="owner/new", redis={"shards": 1})
        needs = {name: list(engine["depends_on"]) for name, engine in made.engines.items()}
        assert needs == {
            "producer-0": ["redis"],
            "consumer-0": ["redis", "producer-0"],
            "consumer-1": ["redis", "consumer-0"],
        }

    def test_services_are_those_of_the_stack(self, cases: list[Case]) -> None:
        for case in cases:
            names = [service.name for service in case.prepared.stack.services]
            assert list(case.services) == names
            assert len(set(names)) == len(names)

    def test_a_document_is_read_as_it_was_written_without_empty_values(
        self, cases: list[Case]
    ) -> None:
        for case in cases[::7]:
            text = document_yaml(case.document)
            assert read(text) == case.document, case.name
            for service in case.services.values():
                assert [key for key, value in service.items() if value in ([], {}, None)] == []

    @pytest.mark.parametrize(
        ("name", "project"), [("pdkit", "pdkit"), ("demo", "pdkit-demo"), ("a_b", "pdkit-a_b")]
    )
    def test_the_project_is_named_after_the_stack(
        self, contained: Make, name: str, project: str
    ) -> None:
        assert contained(name=name).document["name"] == project

    def test_images_by_reference_or_profile(self, contained: Make) -> None:
        made = contained(**OPTIONS["own-image"])
        images = {name: service["image"] for name, service in made.services.items()}
        assert images == {
            **{f"redis-{number}": "pdkit/redis:6.2.14" for number in range(4)},
            "producer-0": "registry.example:5000/mine/vllm:1",
            "consumer-0": "registry.example:5000/mine/vllm:1",
            "router": "mine/router:2",
        }
        seed = contained(vendor="rocm", image="rocm-seed")
        assert seed.services["producer-0"]["image"].startswith("pdkit/vllm-rocm-seed:")

    def test_a_folder_model_is_mounted_by_its_name(self, contained: Make) -> None:
        engine = contained(given=FOLDER_MODEL).services["consumer-0"]
        assert {
            "type": "bind",
            "source": "/data/models/Llama-3B",
            "target": "/models/Llama-3B",
            "read_only": True,
        } in engine["volumes"]
        command = engine["command"]
        assert command[command.index("--model") + 1] == "/models/Llama-3B"


class TestCaches:
    def test_compiled_code_of_gpu_engines_survives_their_containers(
        self, cases: list[Case]
    ) -> None:
        """And no two engines write to the same home: AITER copies itself there."""
        for case in cases:
            names = ("HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
            places = [[e["environment"].get(n) for n in names] for e in case.engines.values()]
            if case.vendor == "cpu":
                assert places == [["/tmp", None, "/cache/vllm"]] * len(places), case.name
                continue
            assert all(path.startswith("/cache/") for one in places for path in one), case.name
            assert len({home for home, *_ in places}) == len(places), case.name

    def test_each_image_has_its_own_writable_cache(self, contained: Make) -> None:
        mounts = [
            {m["target"]: m for m in contained(image=image).services["producer-0"]["volumes"]}
            for image in ("mine/vllm:1", "mine/vllm:2")
        ]
        assert mounts[0]["/cache"]["source"] != mounts[1]["/cache"]["source"]
        assert not mounts[0]["/cache"]["read_only"]


class TestEngines:
    def test_settings_that_keys_depend_on_are_equal_in_all_engines(self, cases: list[Case]) -> None:
        for case in cases:
            engines = case.engines.values()
            assert len({engine["environment"]["PYTHONHASHSEED"] for engine in engines}) == 1
            for option in ("--model", "--dtype", "--block-size", "--tensor-parallel-size"):
                said = {
                    engine["command"][engine["command"].index(option) + 1] for engine in engines
                }
                assert len(said) == 1, (case.name, option)

    def test_shares_of_memory(self, cases: list[Case]) -> None:
        for case in cases:
            total: float = 0
            for engine in case.engines.values():
                command = engine["command"]
                given = "--gpu-memory-utilization" in command
                assert given is (case.vendor != "cpu"), case.name
                if given:
                    total += float(command[command.index("--gpu-memory-utilization") + 1])
            if case.prepared.plan.shares_gpus:
                assert total <= 0.9, case.name

    def test_the_connector_is_loaded_from_its_mount(self, cases: list[Case]) -> None:
        for case in cases:
            for engine in case.engines.values():
                command = engine["command"]
                said = command[command.index("--kv-transfer-config") + 1]
                own = "connector" if uses_lmcache_inside(case) else "server_connector"
                assert json.loads(said)["kv_connector_module_path"] == f"pdkit_connector.{own}"
                (folder,) = (
                    mount["target"]
                    for mount in engine["volumes"]
                    if mount["source"].endswith("/connector")
                )
                assert folder in engine["environment"]["PYTHONPATH"].split(":"), case.name

    def test_configuration_is_read_where_it_is_mounted(self, cases: list[Case]) -> None:
        for case in filter(uses_lmcache_inside, cases):
            for engine in case.engines.values():
                file = engine["environment"]["LMCACHE_CONFIG_FILE"]
                assert file in [secret["target"] for secret in engine["secrets"]], case.name

    def test_telemetry_is_off(self, cases: list[Case]) -> None:
        for case in cases:
            for engine in case.engines.values():
                assert engine["environment"]["VLLM_NO_USAGE_STATS"] == "1"
                assert engine["environment"]["LMCACHE_TRACK_USAGE"] == "false"
                assert engine["environment"]["DO_NOT_TRACK"] == "1"


def test_every_vendor_is_in_the_product(cases: list[Case]) -> None:
    assert {case.vendor for case in cases} == set(VENDORS)


def test_a_machine_without_its_gpus_is_assumed_to_have_them(contained: Make) -> None:
    made = contained(vendor="rocm", gpus=2)
    assert made.prepared.inventory.cpus == 16, "the rest is this machine's"
    described = Inventory(cpus=4, memory_mib=1 << 16)
    with pytest.raises(Exception, match="2 GPUs needed for --vendor rocm, none found"):
        contained(vendor="rocm", gpus=2, machine=described)
