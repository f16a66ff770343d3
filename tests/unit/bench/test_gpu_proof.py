"""The proof on GPUs, without one: what fails a step, what is done again, what is written down."""

from __future__ import annotations

import argparse
import base64
import hashlib
import math
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.gpu_proof import page, prompts, run, steps, vendor_tools
from bench.gpu_proof.install import InstallFailed, engines_python, install, require
from bench.gpu_proof.model import SHAPES, _config
from bench.gpu_proof.results import ROOT, WRONG_ANSWERS, Result, Results
from bench.gpu_proof.session import Session, Stack, StepFailed
from bench.gpu_proof.steps import STEPS, Step
from deploy.config.fields import MP
from deploy.config.model import resolve_model
from deploy.planning.inventory import Gpu, Inventory
from deploy.runtime.detect.nvidia import parse_gpus
from deploy.runtime.detect.tool import Tools
from deploy.tiny_model import config_json
from deploy.verify.equivalence import Completion

RECORDED = ROOT / "tests/fixtures/detect"


# Steps, and going on.


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ran]:
    """Return a proof of two steps on a machine without a GPU."""
    proof = Ran(tmp_path)
    steps = tuple(Step(name, f"step {name}", proof.step(name)) for name in ("one", "two"))
    monkeypatch.setattr(run, "STEPS", steps)
    monkeypatch.setattr(run, "kit_commit", lambda: proof.commit)
    monkeypatch.setattr(Session, "down", lambda _: proof.ran.append("down"))
    monkeypatch.setattr(page, "_engines", lambda: "vLLM, LMCache")
    return proof


@dataclass
class Ran:
    """What the steps of a test do, and in which order they ran."""

    folder: Path
    commit: str = "abc"
    trouble: dict[str, Exception | str] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def step(self, name: str) -> Any:
        def do(_: Session) -> tuple[dict[str, str], list[str]]:
            self.ran.append(name)
            trouble = self.trouble.get(name)
            if isinstance(trouble, Exception):
                raise trouble
            return {"seen": name}, [trouble] if trouble else []

        return do

    def __call__(self, *, began: float = 1e12, **options: Any) -> int:
        self.ran.clear()
        plain = {"only": None, "minutes": 30.0, "port": 20000, "keep": False, "short": True}
        asked = {
            "cpu": True, "shape": "qwen3-0.6b",
            "state": self.folder, "results": self.folder / "page.md",
        }  # fmt: skip
        return run.run(argparse.Namespace(**plain | asked | options), began=began)

    @property
    def page(self) -> str:
        return (self.folder / "page.md").read_text()


def test_all_steps_pass(ran: Ran) -> None:
    assert ran() == run.DONE
    assert ran.ran == ["one", "two", "down"]
    assert "**All 2 steps passed.**" in ran.page


@pytest.mark.parametrize("trouble", ["wrong KV", StepFailed("wrong KV"), ValueError("wrong KV")])
def test_a_step_that_fails_fails_the_command_and_the_page(
    ran: Ran, trouble: Exception | str
) -> None:
    ran.trouble["one"] = trouble
    logs = ran.folder / "home" / "stacks" / "gpu-proof" / "logs"
    logs.mkdir(parents=True)
    (logs / "producer-0.log").write_text("why")
    assert ran() == run.FAILED
    assert [file.name for file in (ran.folder / "logs").iterdir()] == ["one"]
    assert (ran.folder / "logs" / "one" / "producer-0.log").read_text() == "why"
    assert ran.ran == ["one", "two", "down"], "the others run all the same"
    assert "**FAILED: one.**" in ran.page and "wrong KV" in ran.page
    assert "| one | step one | FAILED |" in ran.page


def test_wrong_answers_without_the_pins_are_a_result(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run.STEPS
    found = {WRONG_ANSWERS: ["other tokens"]}, []
    monkeypatch.setattr(run, "STEPS", (one, replace(two, run=lambda _: found)))
    assert ran() == run.DONE
    assert "wrong answers: other tokens (" in capsys.readouterr().err
    assert "**All 1 steps with the pins passed; 1 without them had wrong answers.**" in ran.page
    assert "| two | step two | wrong answers |" in ran.page
    assert "| step two | no | other tokens |" in ran.page
    assert ran() == run.DONE and ran.ran == ["down"], "it is not repeated"
    monkeypatch.setattr(run, "STEPS", (*run.STEPS, replace(one, name="three")))
    assert ran(only="two") == run.DONE
    assert "**1 of 3 steps passed; not run: 1.**" in ran.page
    monkeypatch.setattr(run, "STEPS", run.STEPS[:2])
    found[0][WRONG_ANSWERS].clear()
    assert ran(only="two") == run.DONE
    assert "**All 2 steps passed.**" in ran.page and "| step two | yes | - |" in ran.page


def test_the_next_run_continues(ran: Ran) -> None:
    ran.trouble["two"] = "at first"
    assert ran() == run.FAILED
    ran.trouble.clear()
    assert ran() == run.DONE and ran.ran == ["two", "down"]
    assert ran(only="one") == run.DONE and ran.ran == ["one", "down"]
    ran.commit = "def"
    assert ran() == run.DONE and ran.ran == ["one", "two", "down"], "another kit proves it anew"


def test_nothing_runs_after_the_time_limit(ran: Ran) -> None:
    assert ran(began=0.0, keep=True) == run.TO_GO_ON
    assert ran.ran == []
    assert "0 of 2 steps passed" in ran.page


def test_an_unknown_step_is_refused(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(only="three") == run.USAGE
    assert "'three' is not one of one, two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("versions", "chosen", "page"),
    [
        (("0.32.0", "0.5.6"), ["one", "server"], "gpu-cpu.md"),
        (("0.33.0", "0.5.6"), ["one"], "gpu-cpu.md"),
        (None, ["server"], "gpu-cpu-lmcache-mp.md"),
    ],
)
def test_steps_are_those_of_the_connectors_that_work(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, versions: Any, chosen: list[str], page: str
) -> None:
    """None: as on CUDA with this pair, where LMCache inside the engines is broken."""
    steps = (
        Step("one", "-", ran.step("one")),
        Step("server", "-", ran.step("server"), connector=MP),
    )
    monkeypatch.setattr(run, "STEPS", steps)
    if versions:
        monkeypatch.setattr(run, "engine_versions", lambda _: versions)
    else:
        monkeypatch.setattr(run, "working_connectors", lambda _: (MP,))
    assert ran(results=None, short=False) == run.DONE
    assert ran.ran == [*chosen, "down"]
    assert (ran.folder / page).is_file()
    assert ran(only="server", short=False) == run.DONE
    assert ran.ran == ["server", "down"], "as asked for"


def test_each_version_pair_has_one_connector_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for versions, works in ((("0.25.1", "0.5.3"), "lmcache"), (("0.32.0", "0.5.6"), "lmcache-mp")):
        monkeypatch.setattr(run, "engine_versions", lambda _, v=versions: v)
        assert run.working_connectors("cuda") == (works,)
    assert {step.connector for step in STEPS if step.name.startswith("server")} == {MP}


def test_a_machine_without_gpus_is_refused(
    ran: Ran, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(run, "detect_inventory", lambda: Inventory(1, 1024, (), seen=("none",)))
    assert ran(cpu=False) == run.MISSING
    assert "there is no GPU here (none)" in capsys.readouterr().err


def test_a_step_with_a_truncated_result_runs_again(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.write(Result("one", 1.0, {"a": 1}, (), "abc"))
    assert results.is_done("one", "abc") and not results.is_done("one", "def")
    (tmp_path / "one.json").write_text('{"step": "one", "sec')
    assert results.read("one") is None and not results.is_done("one", "abc")


def test_a_step_has_a_deadline() -> None:
    with pytest.raises(run.TimeIsUp, match="within 60 s"), run._deadline(60):
        signal.raise_signal(signal.SIGALRM)


def test_steps_fit_their_time() -> None:
    assert run.STEP_S < 8 * 60
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    assert "runner-1-sync" not in names  # what the pins select
    assert sum("runner-" in name for name in names) == 3


# The steps of vLLM's other model runners and scheduling modes, and of Redis killed.


class Killing:
    """A session whose stack loses Redis before a load, and answers as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, not_loaded: int, difference: float):
        killed = prompts.Killed(difference == 0, not_loaded, difference)
        right = argparse.Namespace(failures=[], row=dict)
        monkeypatch.setattr(prompts, "cross", lambda *_: right)
        monkeypatch.setattr(prompts, "kill_redis_before_load", lambda *_: killed)

    setup = None

    def stack(self, *_: Any, **__: Any) -> Any:
        return self

    def says(self, _: str) -> bool:
        """Run the second model runner."""
        return True


def test_wrong_answers_fail_the_pinned_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    session = cast(Session, Killing(monkeypatch, not_loaded=4, difference=math.inf))
    wrong = ["the answer is wrong: other tokens"]
    assert steps.redis_killed(session)[1] == wrong
    facts, failures = steps.runner(2, asynchronous=True)(session)
    assert (facts[WRONG_ANSWERS], failures) == (wrong, [])


def test_right_answers_are_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    session = cast(Session, Killing(monkeypatch, not_loaded=4, difference=0.0))
    assert steps.redis_killed(session)[1] == []
    facts, failures = steps.runner(2, asynchronous=True)(session)
    assert (facts[WRONG_ANSWERS], failures) == ([], [])


def test_a_trial_that_tried_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    session = cast(Session, Killing(monkeypatch, not_loaded=0, difference=0.0))
    for step in (steps.redis_killed, steps.runner(2, asynchronous=False)):
        with pytest.raises(StepFailed, match="too late"):
            step(session)
    with pytest.raises(StepFailed, match="another runner ran"):
        steps.runner(1, asynchronous=True)(session)


# Prompts.


@dataclass
class Engines:
    """Two engines with sound KV, unless a test says otherwise.

    The consumer is asked to compute, again, for another prompt, and to load.
    """

    loads: int = 512
    noise: float = 0.0
    loaded: float = 0.0
    deaf: bool = False
    asked: list[str] = field(default_factory=list)

    def ask(self, whom: str, prompt: list[int], _tokens: int = 16) -> Completion:
        self.asked.append(whom)
        after = sum(whom == "consumer-0" for whom in self.asked)
        off = {2: self.noise, 3: 0.0 if self.deaf else 5.0, 4: self.loaded}.get(after, 0.0)
        return Completion(["a"], [{"a": -1.0 - off}], len(prompt))

    def forget(self) -> None:
        pass

    def counters(self, _whom: str) -> Any:
        hits = self.loads if len(self.asked) > 4 else 0
        return argparse.Namespace(external_hits=hits)


def crossed(engines: Engines) -> prompts.Crossing:
    return prompts.cross(cast(Stack, engines), 515)


def test_a_prompt_loaded_whole_passes() -> None:
    crossing = crossed(Engines())
    assert crossing.failures == []
    assert crossing.row()["loaded"] == crossing.row()["eligible"] == 512


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        (Engines(loads=256), "256 of 512 loaded"),
        (Engines(loaded=0.5), "answers differ: 0.5 (tolerated"),
        (Engines(noise=3.0), "own answers differ: 3.0"),
        (Engines(deaf=True), "another prompt's answer looks the same"),
    ],
)
def test_a_prompt_not_loaded_whole_fails(engines: Engines, said: str) -> None:
    (failure,) = crossed(engines).failures
    assert said in failure


@dataclass
class Tiers:
    """Engines and a server whose tiers take a known time, and whose Redis may have nothing."""

    in_redis: bool = True
    hits: int = 0
    dropped: bool = False
    stored: list[int] = field(default_factory=list)

    def timed(self, _whom: str, prompt: list[int]) -> float:
        if prompt != self.stored:
            return 4.0
        dropped, self.dropped = self.dropped, False
        if dropped and not self.in_redis:
            return 4.0
        self.hits += 1792
        return 2.0 if dropped else 1.0

    def ask(self, _whom: str, prompt: list[int], _tokens: int) -> None:
        self.stored = prompt

    def drop_from_memory(self, _prompt: list[int]) -> None:
        self.dropped = True

    def counters(self, _whom: str) -> Any:
        return argparse.Namespace(external_hits=self.hits)


def test_first_tokens_are_timed_by_tier() -> None:
    facts = prompts.tier_rates(cast(Stack, Tiers()), 2000, 2)
    assert facts["computed / from memory"] == 4 and facts["computed / from Redis"] == 2
    assert facts["tokens not loaded"] == 0
    assert prompts.tier_rates(cast(Stack, Tiers(in_redis=False)), 2000, 2)["tokens not loaded"] == (
        2 * 1792
    )


def test_other_tokens_have_no_difference_in_numbers() -> None:
    assert prompts.told(math.inf) == "other tokens"
    assert prompts.told(0.12345) == 0.123


def test_noise_is_allowed_for() -> None:
    assert crossed(Engines(noise=0.1, loaded=0.5)).failures == []
    assert crossed(Engines(noise=0.03, loaded=0.5)).failures != []


def test_models_have_the_kv_of_their_patterns() -> None:
    for name, kv_bytes in (("qwen3-0.6b", 114_688), ("llama-8b", 131_072)):
        config = _config(SHAPES[name], config_json())
        shape = resolve_model("tiny", tiny_path=Path(), tiny_config=config).shape
        assert shape is not None and shape.kv_bytes_per_token(2) == kv_bytes


# The vendor's tools.


def test_fixtures_have_the_tools_output_without_serial_numbers(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "nvidia-smi").write_text(f"#!/bin/sh\nexec cat {RECORDED}/nvidia/h100x8.csv\n")
    (bin_ / "nvidia-smi").chmod(0o755)
    tools = Tools({"PATH": f"{bin_}:/usr/bin:/bin"}, root=tmp_path)
    assert vendor_tools.record(tmp_path, "h100", tools, tmp_path / "kfd") == ["nvidia/h100.csv"]
    was = parse_gpus((RECORDED / "nvidia/h100x8.csv").read_text())
    now = parse_gpus((tmp_path / "nvidia/h100.csv").read_text())
    assert [replace(one.gpu, uuid="") for one in was] == [replace(g.gpu, uuid="") for g in now]
    uuids = {one.gpu.uuid for one in now}
    assert len(uuids) == 8 and not uuids & {one.gpu.uuid for one in was}


def test_serial_numbers_of_amd_gpus_are_left_out() -> None:
    text = vendor_tools.without_serials(
        '"asic_serial": "0x2E05319ACB5C7427",\n"market_name": "MI300X"\nunique_id 123456\n'
    )
    assert "2E05" not in text and "123456" not in text and '"market_name": "MI300X"' in text


def test_machines_are_named_after_their_gpus() -> None:
    def named(count: int) -> str:
        gpus = tuple(Gpu(n, "cuda", "NVIDIA H100 80GB HBM3", 81559) for n in range(count))
        return vendor_tools.short_name(Inventory(1, 1024, gpus), "cuda")

    assert named(1) == "nvidia-h100-80gb-hbm3"
    assert named(2) == "nvidia-h100-80gb-hbm3-x2"
    assert named(0) == "cuda"


# The installation.


def wheel(folder: Path, name: str, text: str) -> None:
    """Write a wheel of one module."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {path: hashlib.sha256(body.encode()).digest() for path, body in files.items()}
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},{len(files[path])}"
        for path, digest in digests.items()
    ]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, body in files.items():
            archive.writestr(path, body)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))


@pytest.mark.full
def test_wheels_are_installed_beside_what_the_machine_has(tmp_path: Path) -> None:
    wheel(tmp_path, "newcomer", "import uv")  # the machine's Python has uv
    machine = str(ROOT / ".uv/bin/python")
    install(tmp_path / "engines", tmp_path, machine)
    python = tmp_path / "engines/bin/python"
    file = next((tmp_path / "engines").rglob("newcomer.py"))
    with pytest.raises(InstallFailed, match=r"lacks .*lmcache.* vllm"):
        require(python)
    file.unlink()
    install(tmp_path / "engines", tmp_path, machine)
    assert not file.exists(), "what is installed is not installed again"
    wheel(tmp_path, "another", "import uv, newcomer")
    install(tmp_path / "engines", tmp_path, machine)
    assert file.exists()

    subprocess.run((python, "-c", "import another"), check=True, timeout=60)


def test_missing_parts_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InstallFailed, match="--wheels FOLDER, or --python"):
        engines_python(tmp_path, None, None, cpu=False)
    with pytest.raises(InstallFailed, match="holds no wheels"):
        engines_python(tmp_path, tmp_path, None, cpu=False)
