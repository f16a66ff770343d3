"""Which images a stack runs in, how one is had, and what is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from deploy.config.catalog import load_catalog
from deploy.config.compat import PairRule, load_rules
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError, MissingImage
from deploy.planning.inventory import Inventory
from deploy.runtime.compose.images import FoundImage, ImageVersions
from deploy.workflows import catalog_images, image_builds
from deploy.workflows import images as images_module
from deploy.workflows import prepare as prepare_module
from deploy.workflows.catalog_images import build_images, image_rows, pull_images
from deploy.workflows.images import (
    found_images,
    obtain_images,
)
from deploy.workflows.prepare import Facts, Prepared, prepare
from deploy.workflows.software import Containers
from deploy.workflows.stack_images import refuse_bad_pair, stack_images
from deploy.workflows.up import _same_software
from tests.unit.conftest import HOME

Make = Callable[..., StackSpec]
TODAY = date(2026, 12, 31)
REDIS = load_catalog().services["redis"]


class Docker:
    """What is on the machine, and what was done to get it."""

    def __init__(self) -> None:
        self.here: dict[str, FoundImage] = {}
        self.done: list[tuple[Any, ...]] = []
        self.asked: list[tuple[str, str]] = []
        self.offline = False
        self.only_by = ""  # the interpreter that has vLLM; all of them if ""
        # What is in images, by reference; in those of the catalogue, what it says.
        self.held = {
            engine.image: ImageVersions(engine.vllm, engine.lmcache)
            for engine in load_catalog().engines.values()
        }

    def have(self, *references: str) -> None:
        for reference in references:
            self.here[reference] = FoundImage(reference, f"sha256:{reference}", {}, 100)

    def have_by(self, reference: str, *digests: str) -> None:
        """Have the image of a tag, which registries know by these digests."""
        self.here[reference] = FoundImage(reference, "sha256:id", {}, 100, digests)

    def pull(self, reference: str, *, otherwise: str = "") -> None:
        self.done.append(("pull", reference))
        if self.offline:
            raise MissingImage(f"{reference} cannot be pulled: no such host", hint=otherwise)
        self.have(reference)

    def build(
        self,
        reference: str,
        folder: Path,
        arguments: Mapping[str, str],
        *,
        wheelhouse: Any,
        attest: bool,
    ) -> None:
        self.done.append(("build", reference, folder.name, dict(arguments), wheelhouse))
        self.attested = attest
        self.have(reference)

    def probe(self, image: FoundImage, interpreter: str) -> ImageVersions:
        self.asked.append((image.reference, interpreter))
        if self.only_by not in ("", interpreter):
            return ImageVersions(None, None)
        return self.held.get(image.reference, ImageVersions(None, None))


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> Docker:
    made = Docker()
    for module in (images_module, image_builds, image_builds):
        monkeypatch.setattr(module, "find_image", made.here.get)
    for module in (image_builds, catalog_images):
        monkeypatch.setattr(module, "pull_image", made.pull)
    monkeypatch.setattr(image_builds, "build_image", made.build)
    monkeypatch.setattr(images_module, "probe_versions", made.probe)
    monkeypatch.setattr(catalog_images, "answering_engine", lambda: None)
    monkeypatch.setattr(catalog_images, "engine_answers", lambda: True)
    return made


class TestNames:
    @pytest.mark.parametrize("vendor", ["cuda", "rocm", "cpu"])
    def test_the_vendors_default(self, spec: Make, vendor: str) -> None:
        images = stack_images(spec(), vendor)
        assert images.engine.name == vendor
        assert images.by_name.engine == images.engine.image
        assert images.by_name.redis == f"{REDIS.image}@{REDIS.digest}"

    def test_a_profile_of_the_vendor(self, spec: Make) -> None:
        assert stack_images(spec(image="rocm-seed"), "rocm").engine.name == "rocm-seed"

    @pytest.mark.parametrize("vendor", ["cuda", "rocm", "cpu"])
    def test_a_users_own_is_run_by_the_vendors_interpreter(self, spec: Make, vendor: str) -> None:
        images = stack_images(spec(image="mine/vllm:1"), vendor)
        assert images.engine.image == "mine/vllm:1"
        assert images.engine.vllm is None
        default = stack_images(spec(), vendor).engine
        assert images.by_name.engine_program == default.interpreter

    def test_a_profile_of_another_vendor_is_refused(self, spec: Make) -> None:
        with pytest.raises(ConfigError) as caught:
            stack_images(spec(image="rocm"), "cuda")
        assert (
            "--image: 'rocm' is an image for rocm, and the vendor is cuda" in caught.value.message
        )
        assert "--vendor rocm --image rocm" in caught.value.hint
        assert "deploy swap rocm" in caught.value.hint

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("cudda", "did you mean 'cuda'?"),
            ("vllm/vllm-openai", "lacks a tag or a digest"),
            ("Mine/vLLM:1", "lower case"),
            ("a b:1", "neither a profile nor an image reference"),
        ],
    )
    def test_a_value_that_names_no_image_is_refused(
        self, spec: Make, value: str, words: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            stack_images(spec(image=value), "cuda")
        assert f"'{value}'" in caught.value.message
        assert words in caught.value.message
        assert caught.value.hint == "deploy images list"

    @pytest.mark.parametrize(
        ("asked", "image", "built"),
        [
            (None, REDIS.image, False),
            ("redis-local", "pdkit/redis:6.2.14", True),
            ("pdkit/redis:6.2.14", "pdkit/redis:6.2.14", True),
            ("registry.example/redis:7", "registry.example/redis:7", False),
        ],
    )
    def test_a_service_by_name_or_reference(
        self, spec: Make, asked: str | None, image: str, built: bool
    ) -> None:
        redis = stack_images(spec(redis={"image": asked}), "cpu").redis
        assert redis.image == image
        assert (redis.build is not None) is built

    def test_a_tag_that_is_asked_for_is_taken_by_the_tag(self, spec: Make) -> None:
        for asked in (REDIS.image, "mine/redis:7"):
            assert stack_images(spec(redis={"image": asked}), "cpu").by_name.redis == asked
        assert stack_images(spec(redis={"image": "redis"}), "cpu").redis is REDIS

    @pytest.mark.parametrize("service", ["redis", "router"])
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("a b:1", "neither a profile nor an image reference"),
            ("redis", "lacks a tag"),
            ("Mine/x:1", "lower case"),
            ("cuda", "lacks a tag"),
        ],
    )
    def test_unknown_service_is_refused(
        self, spec: Make, service: str, value: str, words: str
    ) -> None:
        if service == value:
            return  # its own name
        with pytest.raises(ConfigError) as caught:
            stack_images(spec(**{service: {"image": value}}), "cpu")
        assert caught.value.message.startswith(f"{service}.image: '{value}'")
        assert words in caught.value.message
        assert caught.value.exit_code == 2

    def test_a_router_of_ones_own_keeps_its_interpreter(self, spec: Make) -> None:
        usual = stack_images(spec(), "cpu").router
        own = stack_images(spec(router={"image": "mine/router:1"}), "cpu").router
        assert (own.image, own.interpreter, own.build) == (
            "mine/router:1", usual.interpreter, None,
        )  # fmt: skip


class TestPairs:
    GOOD = ("0.25.1", "0.5.3")
    BAD = ("0.26.0", "0.5.6")
    UNKNOWN = ("0.9.0", "0.9.0")

    @pytest.mark.parametrize("vendor", ["cuda", "rocm"])
    def test_a_good_one_passes_in_silence(self, spec: Make, vendor: str) -> None:
        refuse_bad_pair(spec(), vendor, *self.GOOD, pytest.fail)

    @pytest.mark.parametrize(
        ("pair", "words"), [(BAD, "is broken"), (UNKNOWN, "is untested"), ((None, None), "not")]
    )
    def test_another_is_refused_unless_it_is_allowed(
        self, spec: Make, pair: tuple[str | None, str | None], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words) as caught:
            refuse_bad_pair(spec(), "cuda", *pair, pytest.fail)
        assert "--allow-untested" in caught.value.hint
        assert "A tested pair is" in caught.value.message
        lines: list[str] = []
        refuse_bad_pair(spec(allow_untested=True), "cuda", *pair, lines.append)
        assert len(lines) == 1
        assert lines[0].startswith("warning: ")

    def test_the_options_of_the_spec_are_judged(self, spec: Make) -> None:
        slow = PairRule("x", "known_bad", ("cuda",), "", "", "lost", "", ("layerwise",))
        refuse_bad_pair(spec(), "cuda", *self.GOOD, pytest.fail, (*load_rules(), slow))
        with pytest.raises(ConfigError, match="is broken: lost"):
            refuse_bad_pair(spec(layerwise=True), "cuda", *self.GOOD, pytest.fail, (slow,))


class TestObtaining:
    def test_local_images_are_used_as_they_are(self, spec: Make, docker: Docker) -> None:
        images = stack_images(spec(), "cuda")
        docker.have(images.engine.image, images.router.image, images.by_name.redis)
        found = obtain_images(images, spec(), "cuda", pytest.fail)
        assert docker.done == []
        assert found.redis == images.by_name.redis
        assert found.engine_id == f"sha256:{images.engine.image}"

    def test_an_image_from_a_file_is_run_by_its_tag(self, spec: Make, docker: Docker) -> None:
        asked = spec(monitoring=True)
        images = stack_images(asked, "cuda")
        tags = {one.name: one.image for one in (images.redis, *images.monitoring)}
        docker.have(images.engine.image, images.router.image, *tags.values())
        found = obtain_images(images, asked, "cuda", pytest.fail)
        assert docker.done == []
        assert found == found_images(images)
        assert {name: getattr(found, name) for name in tags} == tags

    def test_an_image_of_another_digest_is_not(self, spec: Make, docker: Docker) -> None:
        images = stack_images(spec(), "cuda")
        docker.have(images.engine.image, images.router.image)
        docker.have_by(REDIS.image, "docker.io/library/redis@sha256:moved")
        assert found_images(images).redis == images.by_name.redis
        found = obtain_images(images, spec(), "cuda", lambda _: None)
        assert docker.done == [("pull", images.by_name.redis)]
        assert found.redis == images.by_name.redis

    @pytest.mark.parametrize(
        "digest",
        [
            f"mirror/redis@{REDIS.digest}",
            "mirror.example:5000/library/redis@sha256:other",
            # A file saved from a containerd image store keeps the registry's digest.
            f"docker.io/library/redis@{REDIS.digest}",
        ],
    )
    def test_a_tag_that_no_digest_contradicts_is_run(
        self, spec: Make, docker: Docker, digest: str
    ) -> None:
        docker.offline = True
        images = stack_images(spec(), "cuda")
        docker.have(images.engine.image, images.router.image)
        docker.have_by(REDIS.image, digest)
        assert obtain_images(images, spec(), "cuda", pytest.fail).redis == REDIS.image
        assert docker.done == []

    def test_the_pinned_image_is_run_where_both_are_here(self, spec: Make, docker: Docker) -> None:
        images = stack_images(spec(), "cuda")
        docker.have(images.engine.image, images.router.image, REDIS.image, images.by_name.redis)
        found = obtain_images(images, spec(), "cuda", pytest.fail)
        assert found.redis == images.by_name.redis

    def test_a_tag_of_another_digest_is_run_with_a_warning_if_the_pin_cannot_be_pulled(
        self, spec: Make, docker: Docker
    ) -> None:
        """It was pulled earlier, or a containerd image store gave the file's image a digest."""
        docker.offline = True
        asked = spec(monitoring=True)
        images = stack_images(asked, "cuda")
        docker.have(images.engine.image, images.router.image)
        pinned = {one.name: one for one in (images.redis, *images.monitoring)}
        for one in pinned.values():
            docker.have_by(one.image, f"{one.image.partition(':')[0]}@sha256:own-of-{one.name}")
        lines: list[str] = []
        found = obtain_images(images, asked, "cuda", lines.append)
        warnings = [line for line in lines if line.startswith("warning: ")]
        assert len(warnings) == len(pinned) == 3
        for warning, (name, one) in zip(warnings, pinned.items(), strict=True):
            assert getattr(found, name) == one.image
            assert f"(sha256:own-of-{name})" in warning
            assert warning.endswith(f"docker pull {one.image}@{one.digest}")
        rows = {row.name: row for row in image_rows(TODAY)}
        assert all(rows[name].here for name in pinned)

    def test_missing_images_are_built_or_pulled(self, spec: Make, docker: Docker) -> None:
        lines: list[str] = []
        images = stack_images(spec(), "rocm")
        obtain_images(images, spec(), "rocm", lines.append)
        assert [step[:2] for step in docker.done] == [
            ("build", images.engine.image), ("build", images.router.image),
            ("pull", images.by_name.redis),
        ]  # fmt: skip
        assert docker.done[0][2] == "rocm"
        assert docker.done[0][3]["VLLM"] == images.engine.vllm
        assert len(lines) == 3

    def test_a_wheelhouse_of_the_environment(
        self, spec: Make, docker: Docker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PDKIT_WHEELHOUSE", "/wheels")
        obtain_images(stack_images(spec(), "cpu"), spec(), "cpu", lambda _: None)
        assert docker.done[0][4] == Path("/wheels")

    def test_a_users_own_is_asked_what_is_in_it(self, spec: Make, docker: Docker) -> None:
        asked = spec(image="mine/vllm:1")
        docker.have("mine/vllm:1")
        docker.held["mine/vllm:1"] = ImageVersions(*TestPairs.GOOD)
        obtain_images(stack_images(asked, "cuda"), asked, "cuda", lambda _: None)
        assert docker.asked == [("mine/vllm:1", "python3")]

    def test_an_image_with_a_bad_pair_is_refused(self, spec: Make, docker: Docker) -> None:
        asked = spec(image="mine/vllm:1")
        docker.have("mine/vllm:1")
        docker.held["mine/vllm:1"] = ImageVersions(*TestPairs.BAD)
        with pytest.raises(
            ConfigError, match=r"vLLM 0\.26\.0 with LMCache 0\.5\.6 on cuda is broken"
        ):
            obtain_images(stack_images(asked, "cuda"), asked, "cuda", lambda _: None)

    @pytest.mark.parametrize("vendor", ["cuda", "cpu"])
    @pytest.mark.parametrize("python", ["python3", "/opt/venv/bin/python"])
    def test_a_users_own_runs_by_the_interpreter_that_has_vllm(
        self, spec: Make, docker: Docker, vendor: str, python: str
    ) -> None:
        asked = spec(image="mine/vllm:1", allow_untested=True)
        docker.have("mine/vllm:1")
        docker.held["mine/vllm:1"] = ImageVersions(*TestPairs.GOOD)
        docker.only_by = python
        found = obtain_images(stack_images(asked, vendor), asked, vendor, lambda _: None)
        assert found.engine_program == python

    def test_an_image_without_vllm_is_refused_with_the_tried_interpreters(
        self, spec: Make, docker: Docker
    ) -> None:
        asked = spec(image="mine/vllm:1")
        docker.have("mine/vllm:1")
        with pytest.raises(ConfigError) as caught:
            obtain_images(stack_images(asked, "cpu"), asked, "cpu", lambda _: None)
        assert caught.value.message == (
            "--image: no vLLM found by /opt/venv/bin/python, python3 in mine/vllm:1"
        )
        allowed = asked.model_copy(update={"allow_untested": True})
        found = obtain_images(stack_images(allowed, "cpu"), allowed, "cpu", lambda _: None)
        assert found.engine_program == "/opt/venv/bin/python"

    def test_a_catalogue_image_is_asked_by_one_interpreter(
        self, spec: Make, docker: Docker
    ) -> None:
        images = stack_images(spec(), "cpu")
        docker.only_by = "none"
        with pytest.raises(ConfigError, match="is untested"):
            obtain_images(images, spec(), "cpu", lambda _: None)
        assert docker.asked == [(images.engine.image, images.engine.interpreter)]

    @pytest.mark.usefixtures("docker")
    @pytest.mark.parametrize("image", [None, "mine/redis:7"])
    def test_a_redis_that_cannot_be_pulled_can_be_built(
        self, spec: Make, monkeypatch: pytest.MonkeyPatch, image: str | None
    ) -> None:
        def refuse(_reference: str, *, otherwise: str) -> None:
            raise MissingImage("no registry", hint=otherwise)

        monkeypatch.setattr(image_builds, "pull_image", refuse)
        asked = spec(redis={"image": image})
        with pytest.raises(MissingImage) as caught:
            obtain_images(stack_images(asked, "cuda"), asked, "cuda", lambda _: None)
        assert "deploy images build redis-local" in caught.value.hint
        assert "redis: {image: redis-local}" in caught.value.hint
        assert stack_images(spec(redis={"image": "redis-local"}), "cuda").redis.build

    def test_the_contents_of_an_image_count_and_not_its_name(
        self, spec: Make, docker: Docker
    ) -> None:
        images = stack_images(spec(), "cuda")
        docker.held[images.engine.image] = ImageVersions(*TestPairs.BAD)
        with pytest.raises(ConfigError, match="is broken"):
            obtain_images(images, spec(), "cuda", lambda _: None)

    @pytest.mark.usefixtures("docker")
    def test_an_image_that_cannot_be_pulled_is_an_error(
        self, spec: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(reference: str, **_: str) -> None:
            raise MissingImage(f"{reference} cannot be pulled", hint="load it")

        monkeypatch.setattr(image_builds, "pull_image", refuse)
        asked = spec(image="mine/vllm:1")
        with pytest.raises(MissingImage, match="mine/vllm:1"):
            obtain_images(stack_images(asked, "cuda"), asked, "cuda", lambda _: None)


def test_a_redis_from_a_file_is_the_one_that_is_asked_for(spec: Make) -> None:
    images = stack_images(spec(), "cpu").by_name
    for redis, same in ((images.redis, True), (REDIS.image, True), ("mine/redis:8", False)):
        software = Containers(replace(images, redis=redis), "1000:1000", "/hub", hub_token=False)
        facts = Facts(Inventory(cpus=1, memory_mib=1), "cpu", "compose", software)
        assert _same_software(spec(), facts) is same


def test_contents_of_images_need_no_other_plan(
    prepared: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` gets images after it has planned, and then knows what is in them."""
    planned = prepared(vendor="cuda", machine=None, runtime="compose")
    assert isinstance(planned.facts.software, Containers)
    images = replace(planned.facts.software.images, engine_id="sha256:1")
    facts = replace(planned.facts, software=replace(planned.facts.software, images=images))
    wanted = prepare(planned.spec, HOME, facts, model=planned.model)
    monkeypatch.setattr(prepare_module, "make_plan", lambda *_: pytest.fail("it plans again"))
    complete = planned.with_facts(facts, HOME)
    assert complete == wanted
    assert complete.stack.fingerprint() != planned.stack.fingerprint()


class TestLooking:
    def test_nothing_is_fetched(self, spec: Make, docker: Docker) -> None:
        images = stack_images(spec(), "cuda")
        assert found_images(images).engine_id == ""
        docker.have(images.engine.image)
        found = found_images(images)
        assert found.engine_id == f"sha256:{images.engine.image}"
        assert docker.done == []


class TestCatalogue:
    def test_the_list_has_every_image(self, docker: Docker, spec: Make) -> None:
        docker.have(stack_images(spec(), "cpu").engine.image)
        rows = {row.name: row for row in image_rows(TODAY)}
        assert {"cuda", "rocm", "cpu", "router", "redis"} <= rows.keys()
        assert (rows["cpu"].here, rows["cpu"].size_mib) == (True, 100)
        assert (rows["cuda"].here, rows["cuda"].size_mib) == (False, 0)
        assert rows["cpu"].verdict == "tested"
        assert rows["cuda"].verdict == "tested"
        assert {row.vendor for row in rows.values() if row.default} == {"cuda", "rocm", "cpu"}
        for row in rows.values():
            age = TODAY - date.fromisoformat(row.pinned)
            assert row.age_days == age.days > 0, row.name
        assert (rows["redis"].how, rows["router"].how) == ("pull", "build")
        assert json.loads(json.dumps([asdict(row) for row in rows.values()]))

    @pytest.mark.usefixtures("docker")
    def test_no_image_is_local_without_docker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog_images, "engine_answers", lambda: False)
        monkeypatch.setattr(catalog_images, "find_any", lambda _: pytest.fail("looked"))
        assert not any(row.here for row in image_rows(TODAY))

    def test_images_are_built_by_name(self, docker: Docker) -> None:
        built = build_images(
            ("cpu", "router"), {"BASE": "mine:1"}, wheelhouse=Path("/w"), report=lambda _: None
        )
        assert [step[1] for step in docker.done] == built
        for _, _, _, arguments, wheelhouse in docker.done:
            assert arguments["BASE"] == "mine:1", "what is asked for goes before the catalogue's"
            assert wheelhouse == Path("/w")

    def test_a_base_is_held_to_its_digest(self, docker: Docker) -> None:
        cuda = load_catalog().engines["cuda"]
        assert cuda.base and cuda.digest
        pinned = f"{cuda.base}@{cuda.digest}"

        def base() -> str:
            build_images(("cuda",), {}, wheelhouse=None, report=lambda _: None)
            return str(docker.done[-1][3]["BASE"])

        assert base() == pinned
        docker.have(cuda.base)
        assert base() == cuda.base, "it came as a file, which has no digest"
        docker.have_by(cuda.base, "mirror.example/vllm@sha256:other")
        assert base() == cuda.base, "it was tagged from a mirror's"
        assert all(step[0] == "build" for step in docker.done)
        docker.have_by(cuda.base, "vllm/vllm-openai@sha256:moved")
        assert base() == pinned, "the tag has moved since"
        assert docker.done[-2] == ("pull", pinned)

    def test_a_base_that_cannot_be_pulled_is_taken_by_its_tag(self, docker: Docker) -> None:
        cuda = load_catalog().engines["cuda"]
        lines: list[str] = []
        docker.offline = True
        docker.have_by(str(cuda.base), "vllm/vllm-openai@sha256:moved")
        build_images(("cuda",), {}, wheelhouse=None, report=lines.append)
        assert docker.done[-1][3]["BASE"] == cuda.base
        (warning,) = (line for line in lines if line.startswith("warning: "))
        assert "sha256:moved" in warning
        assert warning.endswith(f"docker pull {cuda.base}@{cuda.digest}")
        named = f"{cuda.base}@{cuda.digest}"
        build_images(("cuda",), {"BASE": named}, wheelhouse=None, report=lambda _: None)
        assert docker.done[-1][3]["BASE"] == named, "what is named is taken as it is"

    def test_a_base_without_a_digest_is_refused(self, docker: Docker) -> None:
        base = load_catalog().engines["rocm-seed"].base
        with pytest.raises(
            ConfigError, match=f"the digest of {base}, the base of .* is unknown"
        ) as caught:
            build_images(("cpu", "rocm-seed"), {}, wheelhouse=None, report=lambda _: None)
        assert docker.done == [], "nothing was begun"
        assert f"deploy images build rocm-seed --base {base}@sha256:DIGEST" in caught.value.hint
        named = {"BASE": f"{base}@sha256:{'0a' * 32}"}
        build_images(("rocm-seed",), named, wheelhouse=None, report=lambda _: None)
        assert docker.done.pop()[3]["BASE"] == named["BASE"]
        docker.have(str(base))
        build_images(("rocm-seed",), {}, wheelhouse=None, report=lambda _: None)
        assert docker.done.pop()[3]["BASE"] == base, "it came as a file"

    def test_a_source_that_is_not_a_commit_is_refused(self, docker: Docker) -> None:
        repository, commit = "git+https://github.com/LMCache/LMCache.git", "0a" * 20
        for tail in ("", "@v0.5.3", f"@{commit[:-1]}", f"@{commit}#egg", f"@{commit}/x"):
            with pytest.raises(ConfigError, match="does not name a commit") as caught:
                build_images(
                    ("rocm",), {"LMCACHE_SOURCE": repository + tail},
                    wheelhouse=None, report=lambda _: None,
                )  # fmt: skip
            assert "git ls-remote" in caught.value.hint
        assert docker.done == []
        named = {"LMCACHE_SOURCE": f"{repository}@{commit}"}
        build_images(("rocm",), named, wheelhouse=None, report=lambda _: None)
        assert docker.done[0][3]["LMCACHE_SOURCE"] == named["LMCACHE_SOURCE"]

    def test_a_wheel_for_rocm_without_a_digest_is_refused(
        self, docker: Docker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def built(wheelhouse: Path | None, **arguments: str) -> None:
            build_images(("rocm",), arguments, wheelhouse=wheelhouse, report=lambda _: None)

        with pytest.raises(
            ConfigError, match=r"digest of LMCache.s ROCm wheel in /w is unknown"
        ) as caught:
            built(Path("/w"))
        assert "deploy images build rocm --build-arg LMCACHE_SHA256=" in caught.value.hint
        built(None)
        built(Path("/w"), LMCACHE_SHA256="0a" * 32)
        monkeypatch.setenv("PDKIT_WHEELHOUSE", "/wheels")
        with pytest.raises(ConfigError, match="in /wheels"):
            built(None)
        assert len(docker.done) == 2

    def test_attestations_only_where_they_are_asked_for(self, docker: Docker) -> None:
        for asked in (True, False):
            build_images(("cpu",), {}, wheelhouse=None, report=lambda _: None, attest=asked)
            assert docker.attested is asked

    def test_an_image_that_is_pulled_cannot_be_built(self, docker: Docker) -> None:
        with pytest.raises(ConfigError, match="'redis' is not built here") as caught:
            build_images(("cpu", "redis"), {}, wheelhouse=None, report=lambda _: None)
        assert caught.value.hint == "deploy images pull redis"
        assert docker.done == [], "nothing was begun"

    @pytest.mark.usefixtures("docker")
    def test_unknown_image_names_are_refused(self) -> None:
        for work in (
            lambda: build_images(("cpus",), {}, wheelhouse=None, report=lambda _: None),
            lambda: pull_images(("cpus",), report=lambda _: None),
        ):
            with pytest.raises(ConfigError, match="'cpus' is not an image of the catalogue"):
                work()

    @pytest.mark.usefixtures("docker")
    def test_images_are_pulled_by_digest(self) -> None:
        assert pull_images((), report=lambda _: None) == [f"{REDIS.image}@{REDIS.digest}"]
        (base,) = pull_images(("cuda",), report=lambda _: None)
        assert base.startswith("vllm/vllm-openai:"), "of what is built here, its base"
        assert base.endswith(f"@{load_catalog().engines['cuda'].digest}")
