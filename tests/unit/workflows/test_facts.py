"""What 'auto' means on a machine, and what is found there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.config.compat import connector_of
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError, DockerUnavailable, MissingGpus, MissingTool, StateError
from deploy.planning.inventory import Inventory
from deploy.runtime.home import Home
from deploy.workflows import facts as facts_module
from deploy.workflows import images as images_module
from deploy.workflows import running
from deploy.workflows.facts import (
    NotedSteps,
    container_user,
    facts_here,
    runtime_here,
    stated_facts,
    survey,
    without_held_gpus,
)
from deploy.workflows.prepare import Prepared
from deploy.workflows.software import Containers, Programs
from deploy.workflows.user_files import hub_token
from tests.unit.conftest import MACHINE
from tests.unit.stack.cases import machine_with

Make = Callable[..., StackSpec]
BOTH = replace(
    machine_with("cuda", 0),
    gpus=(*machine_with("cuda", 0).gpus, *machine_with("rocm", 0, 1).gpus),
)

# The driver does not work.
BROKEN = replace(MACHINE, seen=("nvidia-smi: failed with 18: ...",), unusable=("cuda",))


class TestUser:
    @pytest.mark.parametrize(
        ("uid", "gid", "rootless", "user"),
        [
            (0, 0, False, "10001:10001"),
            (1000, 100, False, "1000:100"),
            (1000, 100, True, "0:0"),
            (0, 0, True, "0:0"),
        ],
    )
    def test_never_root_but_where_that_is_the_user(
        self, monkeypatch: pytest.MonkeyPatch, uid: int, gid: int, rootless: bool, user: str
    ) -> None:
        monkeypatch.setattr(os, "getuid", lambda: uid)
        monkeypatch.setattr(os, "getgid", lambda: gid)
        assert container_user(rootless=rootless) == user


class TestStated:
    """For a plan that is only shown."""

    @pytest.mark.parametrize(
        ("machine", "vendor"),
        [
            (machine_with("cuda", 0, 1), "cuda"),
            (machine_with("rocm", 0, 1), "rocm"),
            (MACHINE, "cpu"),
            (BOTH, "rocm"),
        ],
    )
    def test_auto_is_the_vendor_that_is_there(
        self, spec: Make, machine: Inventory, vendor: str
    ) -> None:
        found = stated_facts(spec(), machine, runtime="compose")
        assert (found.vendor, found.runtime) == (vendor, "compose")
        assert isinstance(found.software, Containers)
        assert f"vllm-{vendor}" in found.software.images.engine

    def test_a_named_one_beats_what_is_there(self, spec: Make) -> None:
        found = stated_facts(spec(vendor="cpu", runtime="process"), BOTH, runtime="compose")
        assert (found.vendor, found.runtime) == ("cpu", "process")
        assert isinstance(found.software, Programs)

    def test_gpus_are_assumed_where_no_machine_is_described(
        self, spec: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(facts_module, "detect_inventory", lambda *_: MACHINE)
        asked = spec(vendor="cuda", gpus=4)
        assert len(stated_facts(asked, None, runtime="compose").inventory.gpus) == 4
        assert stated_facts(asked, MACHINE, runtime="compose").inventory.gpus == ()

    def test_a_bad_pair_is_refused_before_anything(self, spec: Make) -> None:
        broken = {"vendor": "cuda", "image": "cuda-mp", "connector": "lmcache"}
        with pytest.raises(ConfigError, match="is broken"):
            stated_facts(spec(**broken), MACHINE, runtime="compose")
        good = spec(vendor="cuda", image="cuda-mp")
        assert stated_facts(good, MACHINE, runtime="compose").vendor == "cuda"
        allowed = spec(**broken, allow_untested=True)
        assert stated_facts(allowed, MACHINE, runtime="compose").vendor == "cuda"


class TestVendor:
    """'auto' is CPUs only where nothing speaks for GPUs."""

    @pytest.mark.parametrize("probe", [True, False])
    def test_auto_is_cpu_where_there_is_no_sign_of_gpus(
        self, spec: Make, monkeypatch: pytest.MonkeyPatch, probe: bool
    ) -> None:
        monkeypatch.setattr(facts_module, "detect_inventory", lambda *_: MACHINE)
        assert stated_facts(spec(), None, runtime="process", probe=probe).vendor == "cpu"

    @pytest.mark.parametrize(
        ("fields", "machine", "words"),
        [
            ({"gpus": 4}, MACHINE, "--gpus 4"),
            ({"gpus": 4}, BROKEN, "--gpus 4"),
            ({}, BROKEN, "none is usable"),
            ({"topology": "2p2d"}, BROKEN, "none is usable"),
        ],
    )
    def test_auto_is_refused_where_gpus_are_meant(
        self,
        spec: Make,
        monkeypatch: pytest.MonkeyPatch,
        fields: dict[str, Any],
        machine: Inventory,
        words: str,
    ) -> None:
        monkeypatch.setattr(facts_module, "detect_inventory", lambda *_: machine)
        with pytest.raises(MissingGpus) as caught:
            stated_facts(spec(**fields), None, runtime="process")
        assert caught.value.exit_code == 3
        assert words in caught.value.message
        assert "--vendor cpu" in caught.value.hint
        assert caught.value.details == machine.seen
        named = spec(**fields, vendor="cpu")
        assert stated_facts(named, None, runtime="process").vendor == "cpu"


class TestRuntime:
    @pytest.mark.parametrize(("answers", "runtime"), [(True, "compose"), (False, "process")])
    def test_auto_is_compose_if_docker_answers(
        self, spec: Make, monkeypatch: pytest.MonkeyPatch, answers: bool, runtime: str
    ) -> None:
        monkeypatch.setattr(facts_module, "docker_answers", lambda _: answers)
        assert runtime_here(spec(), Home.from_environ({})) == runtime

    @pytest.mark.parametrize("runtime", ["compose", "process"])
    def test_a_named_one_asks_nobody(
        self, spec: Make, monkeypatch: pytest.MonkeyPatch, runtime: str
    ) -> None:
        monkeypatch.setattr(facts_module, "docker_answers", lambda _: pytest.fail("asked"))
        assert runtime_here(spec(runtime=runtime), Home.from_environ({})) == runtime


class TestHere:
    @pytest.fixture
    def home(self, tmp_path: Path) -> Home:
        return Home(tmp_path / "state", tmp_path / "cache")

    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Docker with the nvidia runtime, two GPUs, and no image; programs too."""
        asked_with: list[Any] = []

        def detect(info: Any = None) -> Inventory:
            asked_with.append(info)
            kinds = ("nvidia",) if info else ()
            return replace(machine_with("cuda", 0, 1), container_gpus=kinds)

        monkeypatch.setattr(facts_module, "detect_inventory", detect)
        monkeypatch.setattr(facts_module, "require_compose", lambda: (2, 26, 1))
        monkeypatch.setattr(facts_module, "docker_info", lambda: {"SecurityOptions": []})
        monkeypatch.setattr(images_module, "found_images", lambda images: images.by_name)
        monkeypatch.setattr(facts_module, "found_programs", lambda *_: Programs("py", "redis"))
        monkeypatch.setattr(facts_module, "engine_versions", lambda _: ("0.32.0", "0.5.6"))

    def test_facts_of_containers_are_found(self, spec: Make, home: Home) -> None:
        found = facts_here(spec(), home, lambda _: None)
        assert (found.vendor, found.runtime) == ("cuda", "compose")
        assert found.inventory.container_gpus == ("nvidia",), "Docker was asked"
        assert isinstance(found.software, Containers)
        assert not found.software.hub_token

    def test_facts_of_processes_are_found_without_docker(self, spec: Make, home: Home) -> None:
        found = facts_here(spec(runtime="process", vendor="cpu"), home, lambda _: None)
        assert (found.vendor, found.runtime) == ("cpu", "process")
        assert found.software == Programs("py", "redis")
        assert found.inventory.container_gpus == (), "Docker was not"

    def test_a_bad_pair_of_programs(self, spec: Make, home: Home) -> None:
        lines: list[str] = []
        with pytest.raises(
            ConfigError, match=r"vLLM 0\.32\.0 with LMCache 0\.5\.6 on cuda is broken"
        ):
            facts_here(spec(runtime="process", connector="lmcache"), home, lines.append)
        facts_here(spec(runtime="process", allow_untested=True), home, lines.append)
        (warning,) = lines
        assert warning.startswith("warning: vLLM 0.32.0 with LMCache 0.5.6 on cuda is broken")

    def test_a_bad_pair_is_refused_before_images_are_looked_for(
        self, spec: Make, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(images_module, "found_images", lambda _: pytest.fail("looked"))
        with pytest.raises(ConfigError, match="is broken"):
            facts_here(spec(image="cuda-mp", connector="lmcache"), home, lambda _: None)

    def test_a_pair_of_programs_that_works_with_the_other_connector(
        self, spec: Make, home: Home
    ) -> None:
        lines: list[str] = []
        asked = spec(runtime="process")
        facts = facts_here(asked, home, lines.append)
        assert (facts.versions, lines) == (("0.32.0", "0.5.6"), [])
        assert connector_of(asked, facts.vendor, *facts.versions) == "lmcache-mp"
        allowed = spec(runtime="process", allow_untested=True)
        assert connector_of(allowed, facts.vendor, *facts.versions) == "lmcache", "as it was"

    def test_containers_are_asked_for_where_no_docker_is(
        self, spec: Make, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse() -> None:
            raise DockerUnavailable("no Docker engine answers", hint="start it")

        monkeypatch.setattr(facts_module, "require_compose", refuse)
        with pytest.raises(DockerUnavailable):
            facts_here(spec(runtime="compose"), home, lambda _: None)

    @pytest.mark.parametrize("runtime", ["process", "compose"])
    def test_gpus_that_are_not_there_come_before_what_would_run_on_them(
        self, spec: Make, home: Home, monkeypatch: pytest.MonkeyPatch, runtime: str
    ) -> None:
        monkeypatch.setattr(facts_module, "found_programs", lambda *_: pytest.fail("looked"))
        monkeypatch.setattr(images_module, "found_images", lambda _: pytest.fail("looked"))
        with pytest.raises(MissingGpus, match="2 GPUs needed for --vendor rocm, none found"):
            facts_here(spec(runtime=runtime, vendor="rocm"), home, lambda _: None)

    @pytest.mark.parametrize("runtime", ["process", "compose"])
    def test_both_policies_find_the_same(self, spec: Make, home: Home, runtime: str) -> None:
        asked, steps = spec(runtime=runtime, allow_untested=True), NotedSteps()
        found = survey(asked, home, steps, lambda _: None).facts
        assert found == facts_here(asked, home, lambda _: None)
        assert steps.well("gpus")
        assert not any(one.trouble for one in steps.outcomes.values())

    @pytest.mark.parametrize("runtime", ["process", "compose"])
    def test_the_tolerant_one_goes_on_without_gpus(
        self, spec: Make, home: Home, runtime: str
    ) -> None:
        steps = NotedSteps()
        asked = spec(runtime=runtime, vendor="rocm", allow_untested=True)
        found = survey(asked, home, steps, lambda _: None).facts
        assert "none found" in steps.outcomes["gpus"].trouble
        assert [gpu.name for gpu in found.inventory.gpus_of("rocm")] == ["assumed", "assumed"]

    def test_the_tolerant_one_goes_on_without_docker(
        self, spec: Make, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse() -> None:
            raise DockerUnavailable("docker info failed", hint="restart it")

        monkeypatch.setattr(facts_module, "docker_info", refuse)
        found = survey(spec(), home, NotedSteps(), lambda _: None)
        assert found.facts.runtime == "compose", "as `up` would have it, which ends here"
        assert found.docker is not None and found.docker.trouble == "docker info failed"
        with pytest.raises(DockerUnavailable):
            facts_here(spec(), home, lambda _: None)

    def test_a_token_of_the_hub_is_known_of(
        self, spec: Make, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        found = facts_here(spec(), home, lambda _: None)
        assert isinstance(found.software, Containers)
        assert found.software.hub_token
        assert "hf_x" not in repr(found)


class TestHeldGpus:
    @contextmanager
    def beside(self, monkeypatch: pytest.MonkeyPatch, stacks: dict[str, Any]) -> Iterator[Home]:
        """Let other stacks be there: running ones, stopped ones, broken ones."""

        def find(_: Home, name: str) -> Any:
            found = stacks[name]
            if isinstance(found, BaseException):
                raise found
            return found

        home = Home(Path("/nonexistent/s"), Path("/nonexistent/c"))
        monkeypatch.setattr(Home, "stacks_beside", lambda _, name: tuple(stacks.keys() - {name}))
        monkeypatch.setattr(running, "find_stack", find)
        yield home

    @staticmethod
    def stack(made: Prepared, *, runs: bool = True) -> Any:
        return SimpleNamespace(prepared=made, any_running=lambda: runs)

    def test_those_of_a_running_stack_are_left_out_and_said(
        self, prepared: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = prepared(vendor="cuda", runtime="compose", machine=machine_with("cuda", 1, 3))
        with self.beside(monkeypatch, {"other": self.stack(other)}) as home:
            left = without_held_gpus(machine_with("cuda", 0, 1, 2, 3), home, "mine")
        assert [gpu.index for gpu in left.gpus] == [0, 2]
        assert "GPU 1: in use by the stack 'other'" in left.seen
        assert "GPU 3: in use by the stack 'other'" in left.seen

    def test_gpus_of_the_same_stack_are_free(
        self, prepared: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = prepared(vendor="cuda", runtime="compose", machine=machine_with("cuda", 0, 1))
        with self.beside(monkeypatch, {"mine": self.stack(own)}) as home:
            left = without_held_gpus(machine_with("cuda", 0, 1), home, "mine")
        assert len(left.gpus) == 2

    @pytest.mark.parametrize("kind", ["stopped", "broken", "gone", "of processors", "other vendor"])
    def test_others_hold_none(
        self, prepared: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        cuda = prepared(vendor="cuda", runtime="compose", machine=machine_with("cuda", 0, 1))
        rocm = prepared(vendor="rocm", runtime="compose", machine=machine_with("rocm", 0, 1))
        stacks = {
            "stopped": self.stack(cuda, runs=False),
            "broken": StateError("broken"),
            "gone": None,
            "of processors": self.stack(prepared()),
            "other vendor": self.stack(rocm),
        }
        with self.beside(monkeypatch, {"other": stacks[kind]}) as home:
            left = without_held_gpus(machine_with("cuda", 0, 1), home, "mine")
        assert len(left.gpus) == 2


class TestHubToken:
    def test_there_is_no_token_by_default(self, spec: Make) -> None:
        assert hub_token(spec()) is None

    def test_the_token_of_a_named_file_wins(
        self, spec: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "of-the-environment")
        file = tmp_path / "token"
        file.write_text("of-the-file\n")
        assert hub_token(spec(hf_token_file=str(file))) == "of-the-file"
        assert hub_token(spec()) == "of-the-environment"

    def test_the_stored_token_of_the_hub_client_is_used(
        self, spec: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        (tmp_path / "token").write_text("kept\n")
        assert hub_token(spec()) == "kept"
        (tmp_path / "token").write_text("\n")
        assert hub_token(spec()) is None

    @pytest.mark.parametrize("text", [None, "", " \n"])
    def test_a_named_file_without_a_token(
        self, spec: Make, tmp_path: Path, text: str | None
    ) -> None:
        file = tmp_path / "token"
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match="hf_token_file") as caught:
            hub_token(spec(hf_token_file=str(file)))
        assert str(file) in caught.value.message
        assert caught.value.hint


class TestNeither:
    """Neither Docker nor the engines' software: Docker's state comes first."""

    @pytest.fixture
    def lacking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def without_docker() -> None:
            raise DockerUnavailable(
                "no Docker engine answers at unix:///s (permission denied)",
                hint="sudo usermod, or run the stack as processes: deploy up --runtime process",
                fix="sudo usermod",
            )

        def without_engines(*_: object) -> None:
            raise MissingTool("the engines' interpreter py lacks vllm", hint="set engine.python")

        monkeypatch.setattr(facts_module, "detect_inventory", lambda _: MACHINE)
        monkeypatch.setattr(facts_module, "require_compose", without_docker)
        monkeypatch.setattr(facts_module, "found_programs", without_engines)

    @pytest.mark.usefixtures("lacking")
    def test_auto_names_docker_first(self, spec: Make, tmp_path: Path) -> None:
        home = Home(tmp_path / "state", tmp_path / "cache")
        with pytest.raises(DockerUnavailable) as caught:
            facts_here(spec(vendor="cpu"), home, lambda _: None)
        assert caught.value.message == (
            "no Docker engine answers at unix:///s (permission denied); for processes, "
            "the engines' interpreter py lacks vllm"
        )
        assert caught.value.hint == "sudo usermod; or, for processes: set engine.python"
        assert caught.value.exit_code == 3
        steps = NotedSteps()
        survey(spec(vendor="cpu"), home, steps, lambda _: None)
        assert steps.outcomes["programs"].trouble == caught.value.message

    @pytest.mark.usefixtures("lacking")
    def test_processes_that_are_asked_for_are_not_about_docker(
        self, spec: Make, tmp_path: Path
    ) -> None:
        home = Home(tmp_path / "state", tmp_path / "cache")
        with pytest.raises(MissingTool, match=r"^the engines' interpreter py lacks vllm$"):
            facts_here(spec(vendor="cpu", runtime="process"), home, lambda _: None)


class TestDoctor:
    """Its survey notes that no GPU can be used, and goes on as if they could."""

    @pytest.mark.parametrize(
        ("fields", "machine", "said"),
        [
            ({}, MACHINE, ("cpu", "")),
            ({}, BROKEN, ("cuda", "none is usable")),
            ({}, replace(BROKEN, unusable=("rocm",)), ("rocm", "none is usable")),
            ({"gpus": 2}, MACHINE, ("cuda", "--gpus 2, but no usable GPU")),
        ],
    )
    def test_a_vendor_that_cannot_be_settled(
        self,
        spec: Make,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        fields: dict[str, Any],
        machine: Inventory,
        said: tuple[str, str],
    ) -> None:
        vendor, trouble = said
        monkeypatch.setattr(facts_module, "detect_inventory", lambda _: machine)
        monkeypatch.setattr(facts_module, "found_programs", lambda *_: Programs("py", "redis"))
        monkeypatch.setattr(facts_module, "engine_versions", lambda _: ("0.32.0", "0.5.6"))
        steps, lines = NotedSteps(), list[str]()
        home = Home(tmp_path / "state", tmp_path / "cache")
        found = survey(spec(runtime="process", **fields), home, steps, lines.append)
        assert found.facts.vendor == vendor
        assert trouble in steps.outcomes["gpus"].trouble
        assert bool(trouble) == bool(steps.outcomes["gpus"].trouble)
        if trouble:
            assert "deploy up" in steps.outcomes["gpus"].fix
            assert "--vendor cpu" in steps.outcomes["gpus"].fix
            assert len(found.facts.inventory.gpus_of(vendor)) == 2, "assumed, to judge the rest"
        else:
            assert "no GPU found: using CPUs" in lines
            assert steps.outcomes["gpus"].says == "no GPU found: using CPUs"
