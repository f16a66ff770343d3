"""The connector's fixes are tried before anything starts, once for the same code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from deploy.assets import asset
from deploy.errors import FixFailed
from deploy.runtime import fixes as runtime_fixes
from deploy.runtime.fixes import fixes_of_image
from deploy.stack.service import DeviceAccess
from deploy.workflows import fixes
from deploy.workflows.status import stack_status
from deploy.workflows.swap import SwapTo, swap_stack
from deploy.workflows.up import prepare_here
from tests.unit.workflows.conftest import STAND_INS, Lab

FAILS = json.dumps([["B3", "applied"], ["B7", "failed"], ["B8", "failed"]])


def asked(lab: Lab) -> int:
    """Return how often the fixes were tried, and forget it."""
    count = sum(line.startswith("trying the connector's fixes") for line in lab.lines)
    lab.lines.clear()
    return count


def require(lab: Lab, **fields: object) -> None:
    spec = lab.spec(**fields)
    fixes.require_fixes(prepare_here(spec, lab.home, lambda _: None), lab.home, lab.lines.append)


def test_no_fix_is_tried_for_lmcaches_server(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_TRIED", FAILS)
    require(lab, connector="lmcache-mp", redis={}, lmcache={"chunk_size": 64})
    assert asked(lab) == 0


def test_a_fix_that_fails_refuses_the_stack_before_anything_starts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_TRIED", FAILS)
    with pytest.raises(FixFailed) as caught:
        lab.up(lab.spec())
    error = caught.value
    assert error.exit_code == 3
    for part in ("fix B7 (bug of B7)", "LMCache 0.5.6", "seen of B7", "example.com/B7", "loses KV"):
        assert part in error.message
    assert "deploy images list" in error.hint
    assert 'PDKIT_DISABLE_FIXES: "B7,B8"' in error.hint
    assert [line for line in error.details if "B8" in line and "example.com/B8" in line]
    assert lab.pids() == []
    assert not any("started" in line for line in lab.lines)
    assert not lab.home.stack("pdkit").root.exists()


def test_a_refusal_is_not_remembered(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_TRIED", FAILS)
    for _ in range(2):
        with pytest.raises(FixFailed):
            require(lab)
    monkeypatch.delenv("STAND_IN_TRIED")
    require(lab)
    assert asked(lab) == 3


def test_a_user_sees_progress_and_the_second_start_asks_nothing(lab: Lab) -> None:
    require(lab)
    assert lab.lines[0].startswith("trying the connector's fixes in ")
    assert lab.lines[1].startswith("no fix failed: 1 applied (")
    assert asked(lab) == 1
    require(lab)
    assert lab.lines == []


def test_other_versions_switches_and_code_are_asked_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require(lab)
    assert asked(lab) == 1
    monkeypatch.setattr(fixes, "engine_versions", lambda _: ("0.32.0", "0.5.7"))
    require(lab)
    assert asked(lab) == 1
    for env in ({"PDKIT_DISABLE_FIXES": "B7"}, {"PYTHONPATH": "/elsewhere"}):
        require(lab, engine={"env": env, "block_size": 16, "kv_cache_gib": 0.1})
        assert asked(lab) == 1
    monkeypatch.setenv("PDKIT_DISABLE_FIXES", "B8")  # which engines inherit
    require(lab)
    assert asked(lab) == 1
    changed = tmp_path / "connector"
    shutil.copytree(STAND_INS / "connector", changed)
    (changed / "pdkit_connector" / "new.py").write_text("")
    monkeypatch.setattr(fixes, "connector_path", lambda: changed)
    require(lab)
    assert asked(lab) == 1
    require(lab)
    assert asked(lab) == 0


def test_fixes_that_cannot_be_tried_are_left_to_the_engines(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_TRIED", "no JSON")
    require(lab)
    assert lab.lines[-1].startswith("warning: the fixes cannot be tried in ")
    assert asked(lab) == 1
    require(lab)
    assert asked(lab) == 1, "nothing was found out, so there is nothing to remember"


def test_a_home_that_cannot_be_written_asks_each_time(lab: Lab) -> None:
    lab.home.cache.mkdir(parents=True)
    (lab.home.cache / "fixes").write_text("a file in the folder's place")
    require(lab)
    require(lab)
    assert asked(lab) == 2


def test_a_swap_is_refused_before_anything_stops(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.up(lab.spec())
    pids = lab.pids()
    shutil.rmtree(lab.home.cache / "fixes")
    monkeypatch.setenv("STAND_IN_TRIED", FAILS)
    with pytest.raises(FixFailed):
        swap_stack(lab.home, "pdkit", SwapTo("cpu"), lab.lines.append)
    assert lab.pids() == pids
    assert stack_status(lab.home, "pdkit").healthy


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (None, []),
        (DeviceAccess(driver="nvidia", ids=("0", "1")), ["--gpus", '"device=0,1"']),
        (
            DeviceAccess(driver="cdi", ids=("nvidia.com/gpu=0",)),
            ["--device", "nvidia.com/gpu=0"],
        ),
        (
            DeviceAccess(names=("/dev/kfd",), groups=(44,), seccomp="seccomp-rocm.json"),
            [
                *("--device", "/dev/kfd", "--group-add", "44"),
                *("--security-opt", f"seccomp={asset('compose', 'seccomp-rocm.json')}"),
            ],
        ),
    ],
)
def test_an_image_is_asked_with_the_gpus_and_switches_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, devices: DeviceAccess | None, options: list[str]
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(arguments: tuple[str, ...], **_: object) -> CompletedProcess[str]:
        ran.append(arguments)
        return CompletedProcess(arguments, 0, '{"lmcache": "1", "tested": true, "fixes": []}', "")

    monkeypatch.setattr(runtime_fixes, "run_docker", run)
    given = {"PDKIT_DISABLE_FIXES": "B7", "PYTHONPATH": "/theirs"}
    fixes_of_image("sha256:1", "python3", Path("/connector"), given, devices)
    [arguments] = ran
    before, after = arguments[: arguments.index("--entrypoint")], arguments[-6:]
    assert "PDKIT_DISABLE_FIXES=B7" in before
    assert any(part.startswith("PYTHONPATH=/") and part.endswith(":/theirs") for part in before), (
        "the connector's folder is before the user's"
    )
    assert list(before[len(before) - len(options) :]) == options or not options
    assert after == ("--entrypoint", "python3", "sha256:1", "-m", "pdkit_connector", "--json")


def test_the_digest_sees_names_and_contents(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return fixes.code_digest(tmp_path)

    assert digest(a="1", b="2") == digest(a="1", b="2")
    assert (
        len({digest(a="1", b="2"), digest(a="2", b="1"), digest(a="1"), digest(a="12", b="")}) == 4
    )
