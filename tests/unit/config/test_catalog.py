"""The image catalogue, what `--image` means, and the Dockerfiles that the catalogue names."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from itertools import product
from pathlib import Path

import pytest

from deploy.config.catalog import (
    EngineImage,
    ServiceImage,
    load_catalog,
    parse_catalog,
    reference_problem,
)
from deploy.config.compat import OPTIONS, default_connector, judge
from deploy.config.vendors import VENDORS
from deploy.errors import ConfigError

CATALOG = load_catalog()
ENGINES = list(CATALOG.engines.values())
SERVICES = list(CATALOG.services.values())
BUILT: list[EngineImage | ServiceImage] = [image for image in (*ENGINES, *SERVICES) if image.build]
GPU = [engine for engine in ENGINES if engine.vendor != "cpu"]
ROCM = [engine for engine in ENGINES if engine.vendor == "rocm"]
# Built by the Dockerfile of another profile.
OTHER_ARGUMENTS = ("rocm-seed", "cuda-mp")
DIGEST = "sha256:" + "0a" * 32


def name_of(image: EngineImage | ServiceImage) -> str:
    return image.name


def every(images: list[EngineImage]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", images, ids=name_of)


class TestTheCatalogue:
    @every(ENGINES)
    def test_pairs_are_known_to_run(self, engine: EngineImage) -> None:
        pair = (engine.vendor or "", engine.vllm, engine.lmcache)
        assert judge(*pair, connector=default_connector(*pair)).works

    @pytest.mark.parametrize("vendor", VENDORS)
    def test_each_vendor_has_one_default_image(self, vendor: str) -> None:
        assert [e.name for e in ENGINES if e.default and e.vendor == vendor] == [vendor]
        assert CATALOG.default_for(vendor).name == vendor

    @pytest.mark.parametrize(("vendor", "on"), list(product(VENDORS, [(), *zip(OPTIONS), OPTIONS])))
    def test_default_pairs_work_with_every_option(self, vendor: str, on: tuple[str, ...]) -> None:
        engine = CATALOG.default_for(vendor)
        verdict = judge(vendor, engine.vllm, engine.lmcache, on=on)
        assert verdict.verdict in ("tested", "derived")

    @pytest.mark.parametrize("image", [*ENGINES, *SERVICES], ids=name_of)
    def test_images_and_bases_are_pinned(self, image: EngineImage | ServiceImage) -> None:
        for reference in filter(None, (image.image, image.base)):
            assert reference_problem(reference) == ""
            assert re.search(r":[^/:]+$", reference), f"{reference} has no tag"
            assert not reference.endswith(":latest")

    @pytest.mark.parametrize("image", [*ENGINES, *SERVICES], ids=name_of)
    def test_a_digest_has_a_source_and_its_absence_a_reason(
        self, image: EngineImage | ServiceImage
    ) -> None:
        assert image.digest is None or re.fullmatch(r"sha256:[0-9a-f]{64}", image.digest)
        assert image.digest_source.startswith("https://github.com/") == bool(image.digest)
        assert image.digest_source
        assert image.digest or name_of(image) in OTHER_ARGUMENTS, "no document states it"

    @pytest.mark.parametrize("image", BUILT, ids=name_of)
    def test_build_folders_exist_and_get_the_base(
        self, image: EngineImage | ServiceImage, repo: Path
    ) -> None:
        assert (repo / str(image.build)).is_dir()
        assert image.build_args["BASE"] == image.base
        assert all(isinstance(value, str) for value in image.build_args.values())

    def test_names_and_images_are_used_once(self) -> None:
        images = [image.image for image in (*ENGINES, *SERVICES)]
        assert len(set(images)) == len(images)
        assert not set(CATALOG.engines) & set(CATALOG.services)

    def test_the_catalogue_is_read_once_and_immutable(self) -> None:
        assert load_catalog() is CATALOG
        with pytest.raises(FrozenInstanceError):
            CATALOG.engines["cuda"].image = "other:1"  # type: ignore[misc]

    def test_a_key_it_does_not_know_is_refused(self) -> None:
        with pytest.raises(TypeError, match="lmcashe"):
            parse_catalog({"engines": {"x": {"image": "a:1", "lmcashe": "1"}}, "services": {}})

    def test_a_vendor_without_a_default_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="default for 'abacus'"):
            CATALOG.default_for("abacus")


class TestWhatImageMeans:
    def test_a_profile_is_its_image(self) -> None:
        assert CATALOG.named("rocm-seed") is CATALOG.engines["rocm-seed"]

    def test_the_image_of_a_profile_is_the_profile(self) -> None:
        assert CATALOG.named(CATALOG.engines["cuda"].image) == CATALOG.engines["cuda"]

    def test_the_image_of_a_profile_by_digest(self) -> None:
        value = f"{CATALOG.engines['cuda'].image}@{DIGEST}"
        found = CATALOG.named(value)
        assert (found.image, found.name) == (value, "cuda")

    @pytest.mark.parametrize(
        "value",
        [
            "vllm/vllm-openai:v0.25.1",
            "localhost/engine:1",
            "localhost:5000/engine:1",
            "registry.example.com:5000/team/vllm__x/a-b.c:2026.01_x-1",
            f"registry.example.com/vllm@{DIGEST}",
            f"vllm:1@{DIGEST}",
            "[::1]:5000/vllm:1",
            "Registry.Example.COM/vllm:V1",
        ],
    )
    def test_another_image_is_user_supplied(self, value: str) -> None:
        stranger = CATALOG.named(value)
        assert stranger == EngineImage(image=value)
        assert (stranger.vendor, stranger.vllm, stranger.lmcache) == (None, None, None)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("", "neither a profile nor an image"),
            ("cudaa", "did you mean 'cuda'"),
            ("vllm/vllm-openai", "lacks a tag or a digest"),
            ("Vllm/OpenAI:1", "lower case"),
            ("vllm:1 ", "neither"),
            ("vllm:1;rm", "neither"),
            ("--privileged", "neither"),
            ("vllm:", "neither"),
            ("vllm@sha256:12", "neither"),
            ("a//b:1", "neither"),
            ("host:port/vllm:1", "neither"),
            ("https://example.com/vllm:1", "neither"),
            ("vllm:" + "x" * 129, "neither"),
            ("vllm:1\n", "neither"),
        ],
    )
    def test_a_value_that_is_no_profile_or_image_is_refused(self, value: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            CATALOG.named(value)
        assert caught.value.message.startswith("--image: ")
        assert caught.value.hint == "deploy images list"


class Dockerfile:
    """The instructions of one Dockerfile, with the arguments that the catalogue gives it."""

    def __init__(self, repo: Path, image: EngineImage | ServiceImage) -> None:
        self.image = image
        self.folder = repo / str(image.build)
        self.text = (self.folder / "Dockerfile").read_text(encoding="utf-8")
        code = "\n".join(line for line in self.text.splitlines() if not line.startswith("#"))
        lines = code.replace("\\\n", "").splitlines()
        self.steps = [tuple(line.strip().split(None, 1)) for line in lines if line.strip()]
        self.defaults = dict(
            (*rest.split("=", 1), "")[:2] for word, rest in self.steps if word == "ARG"
        )
        self.args = {**self.defaults, **image.build_args}

    def last(self, word: str) -> str:
        return [rest for step, rest in self.steps if step == word][-1]

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda found: self.args[found[1]], text)

    def labels(self) -> dict[str, str]:
        text = " ".join(rest for word, rest in self.steps if word == "LABEL")
        return dict(part.split("=", 1) for part in self.filled(text).split())

    def commands(self) -> list[str]:
        return [rest for word, rest in self.steps if word == "RUN"]


@pytest.fixture
def dockerfile(repo: Path, request: pytest.FixtureRequest) -> Dockerfile:
    """Give the Dockerfile of the image that a test is parametrized with."""
    return Dockerfile(repo, request.param)


def of(images: Sequence[EngineImage | ServiceImage]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dockerfile", images, ids=name_of, indirect=True)


class TestEveryBuiltImage:
    @of(BUILT)
    def test_an_image_is_built_from_the_base_of_the_catalogue(self, dockerfile: Dockerfile) -> None:
        assert dockerfile.steps[0] == ("ARG", f"BASE={dockerfile.defaults['BASE']}")
        assert dockerfile.last("FROM") == "${BASE}"
        assert dockerfile.args["BASE"] == dockerfile.image.base

    @of(BUILT)
    def test_the_catalogue_gives_only_arguments_that_it_has(self, dockerfile: Dockerfile) -> None:
        assert set(dockerfile.image.build_args) <= set(dockerfile.defaults)

    @of([image for image in BUILT if name_of(image) not in OTHER_ARGUMENTS])
    def test_default_build_arguments_are_those_of_the_catalogue(
        self, dockerfile: Dockerfile
    ) -> None:
        assert dockerfile.args == dockerfile.defaults

    @of(BUILT)
    def test_containers_run_as_a_fixed_non_root_user(self, dockerfile: Dockerfile) -> None:
        assert dockerfile.last("USER") == "10001:10001"
        assert dockerfile.last("ENTRYPOINT") == "[]"

    @of(BUILT)
    def test_a_dockerfile_uses_old_syntax_and_pinned_versions(self, dockerfile: Dockerfile) -> None:
        assert "syntax=" not in dockerfile.text
        assert "<<" not in dockerfile.text, "here-documents need BuildKit of 2021"
        assert "latest" not in dockerfile.text.lower()

    @of(BUILT)
    def test_wheels_are_installed_from_the_build_context(self, dockerfile: Dockerfile) -> None:
        (install,) = (rest for rest in dockerfile.commands() if "--mount" in rest)
        assert install.startswith("--mount=type=bind,target=/context ")
        assert "--no-index --find-links /context/wheelhouse" in install

    @of(ENGINES)
    def test_the_labels_of_an_engine_image_are_those_of_the_catalogue(
        self, dockerfile: Dockerfile
    ) -> None:
        engine = dockerfile.image
        assert isinstance(engine, EngineImage)
        assert dockerfile.labels() == {
            "dev.pdkit.profile": engine.name,
            "dev.pdkit.vllm": engine.vllm,
            "dev.pdkit.lmcache": engine.lmcache,
            "dev.pdkit.torch": engine.torch or "unknown",
            "dev.pdkit.python": engine.python,
        }

    @of(ENGINES)
    def test_an_engine_runs_as_any_user(self, dockerfile: Dockerfile) -> None:
        assert "HOME=/tmp USER=pdkit LOGNAME=pdkit" in dockerfile.last("ENV")

    @of([service for service in SERVICES if service.build])
    def test_a_services_labels_tell_its_version(self, dockerfile: Dockerfile) -> None:
        assert isinstance(dockerfile.image, ServiceImage)
        assert dockerfile.image.version in dockerfile.labels().values()


class TestGpuImages:
    @of(GPU)
    def test_the_command_python_exists_in_gpu_images(self, dockerfile: Dockerfile) -> None:
        snippets = re.findall(r"python3 -c '([^']*)'", " ".join(dockerfile.commands()))
        assert len(snippets) == 4
        for snippet in snippets:
            ast.parse(snippet)

    @of(GPU)
    def test_nothing_but_lmcache_may_change(self, dockerfile: Dockerfile) -> None:
        for command in pip_commands(dockerfile):
            assert "--no-deps" in command or "uninstall" in command

    @of(GPU)
    def test_the_build_checks_that_native_code_is_for_this_gpu_vendor(
        self, dockerfile: Dockerfile
    ) -> None:
        proof = dockerfile.commands()[-1]
        ours, other = "libcudart", "libamdhip64"
        if dockerfile.image in ROCM:
            ours, other = other, ours
        assert re.search(
            rf"if ! printf [^|]*\| grep -q '{ours}\\.so'; then [^;]*; exit 1; fi", proof
        )
        assert re.search(
            rf"if printf [^|]*\| grep -q '{other}\\.so'; then [^;]*; exit 1; fi", proof
        )
        assert "os.RTLD_NOW" in proof, "every symbol must be found"

    @of(ROCM)
    def test_rocm_never_gets_the_wheel_for_cuda(self, dockerfile: Dockerfile) -> None:
        listed = (dockerfile.folder / "requirements.txt").read_text(encoding="utf-8")
        assert not re.search(r"^(lmcache|torch|vllm|cupy-cuda\w+|nvidia-\S+)\b", listed, re.M)
        getting = [c for c in pip_commands(dockerfile) if "lmcache" in c and "uninstall" not in c]
        assert len(getting) == 3
        for command in getting:
            assert "--no-index --find-links $LMCACHE_WHEELS" in command or (
                "--no-index /tmp/lmcache/" in command or "--no-binary lmcache" in command
            )

    @of(ROCM)
    def test_every_lmcache_for_rocm_is_checked_by_its_checksum(
        self, dockerfile: Dockerfile
    ) -> None:
        (install,) = (rest for rest in dockerfile.commands() if "--mount" in rest)
        by_wheel, _, by_source = install.partition("else         python3 -m pip install")
        assert "sha256sum --check --strict" in by_wheel.partition('-n "$LMCACHE_SHA256" ]')[2]
        assert "cat /context/lmcache.txt" in by_source
        listed = (dockerfile.folder / "lmcache.txt").read_text(encoding="utf-8")
        assert re.search(
            rf"^lmcache=={CATALOG.engines['rocm'].lmcache} \\\n    --hash=sha256:[0-9a-f]{{64}}$",
            listed,
            re.M,
        )

    def test_rocm_wheels_are_lmcaches_own_of_that_version(self, repo: Path) -> None:
        engine = CATALOG.engines["rocm"]
        wheels = Dockerfile(repo, engine).args["LMCACHE_WHEELS"]
        releases = "https://github.com/LMCache/LMCache/releases/expanded_assets"
        assert wheels == f"{releases}/v{engine.lmcache}-rocm"

    @of(ROCM)
    def test_a_build_from_source_is_for_hip(self, dockerfile: Dockerfile) -> None:
        (build,) = (c for c in pip_commands(dockerfile) if "pip wheel" in c)
        for setting in ("BUILD_WITH_HIP=1", "CXX=hipcc", "TORCH_DONT_CHECK_COMPILER_ABI=1"):
            assert setting in build
        assert "--no-build-isolation" in build, "another torch would be built against"

    def test_the_seeds_source_is_a_commit(self, repo: Path) -> None:
        source = Dockerfile(repo, CATALOG.engines["rocm-seed"]).args["LMCACHE_SOURCE"]
        assert re.fullmatch(r"git\+https://github\.com/\S+\.git@[0-9a-f]{40}", source)

    @every(GPU)
    def test_requirements_are_pinned_by_checksum(self, engine: EngineImage, repo: Path) -> None:
        listed = engine.build_args.get("LIST", "requirements.txt")
        text = (repo / str(engine.build) / listed).read_text(encoding="utf-8")
        entries = re.findall(r"^([a-z][^\s=]*)(==\S+)?(.*(?:\n {4}.*)*)", text, re.M)
        assert entries
        assert all(version and "--hash=sha256:" in rest for _, version, rest in entries)
        if engine.vendor == "cuda":
            assert [(name, version) for name, version, _ in entries] == [
                ("lmcache", f"=={engine.lmcache}"),
                ("xxhash", "==4.1.0"),
            ]


def test_all_images_have_the_same_xxhash_version(repo: Path) -> None:
    """A value's checksum is one that every engine of a stack can compute."""
    files = ("cpu/requirements.lock", "cuda/requirements.txt", "rocm/requirements.txt")
    texts = [(repo / "images" / name).read_text(encoding="utf-8") for name in files]
    assert len({re.findall(r"^xxhash==(\S+)", text, re.M)[0] for text in texts}) == 1


def pip_commands(dockerfile: Dockerfile) -> list[str]:
    parts = " ".join(dockerfile.commands()).split(";")
    return [part for part in parts if "-m pip " in part]


def other_tags(text: str) -> list[str]:
    """Return the references in a text to an image of the catalogue by another tag."""
    known = [image.image for image in (*ENGINES, *SERVICES)]
    names = "|".join(sorted({re.escape(one.rpartition(":")[0]) for one in known}))
    found = re.findall(rf"(?<![\w/.-])(?:{names}):v?\d[\w.-]*\w", text)
    return [one for one in found if one not in known]


def test_pages_name_the_tags_of_the_catalogue(repo: Path) -> None:
    pages = [*repo.glob("*.md"), *(repo / "docs").rglob("*.md")]
    current = [one for one in pages if one.name != "CHANGELOG.md" and one.parent.name != "results"]
    assert {one.name: other_tags(one.read_text(encoding="utf-8")) for one in current} == {
        one.name: [] for one in current
    }
    assert other_tags("`redis:7.0.1` and pdkit/redis:6.2.14") == ["redis:7.0.1"]
