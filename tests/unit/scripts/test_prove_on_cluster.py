"""`scripts/prove-on-cluster`: what it would do, and what it does with a kubectl that answers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.scripts.conftest import ROOT

SCRIPT = ROOT / "scripts" / "prove-on-cluster"
_KUBECTL = """#!/bin/bash
echo "kubectl $*" >>"$CALLS"
case "$*" in
"get namespace"*) [ -n "${THERE:-}" ] ;;
*"get secret"*) printf c2VjcmV0 ;;
*port-forward*) exec sleep 60 ;;
esac
"""
_CURL = """#!/bin/bash
case "$*" in
*/v1/models) echo '{"data": [{"id": "tiny", "permission": [{"id": "modelperm-1"}]}]}' ;;
*) for one in "$@"; do
    case $one in @*) grep -q '"model": "tiny"' "${one#@}" || exit 22 ;; esac
done
printf 'HTTP/1.1 200 OK\\r\\nX-Pdkit-Trace: %s\\r\\n\\r\\n' "$TRACE" ;;
esac
"""
HIT = "producer=producer-10.0.0.1; consumer=consumer-10.0.0.2; tries=2; cached=1024"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    for name in ("stack", "other"):
        base, overlay = tmp_path / name / "base", tmp_path / name / "overlays" / "cpu"
        base.mkdir(parents=True)
        overlay.mkdir(parents=True)
        (base / "namespace.yaml").write_text("kind: Namespace\nmetadata:\n  name: proof\n")
        (overlay / "kustomization.yaml").touch()
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, text in {"kubectl": _KUBECTL, "curl": _CURL}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    return tmp_path


def prove(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    known = {"PATH": path, "CALLS": str(folder / "calls"), "TRACE": HIT, "PROMPTS": "2"}
    return subprocess.run(
        (str(SCRIPT), *arguments),
        cwd=folder, env={**os.environ, **known, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_dry_run_says_all_steps_and_takes_none(exported: Path) -> None:
    ran = prove(exported, "stack", "cpu", "other", DRY_RUN="1")
    assert ran.returncode == 0, ran.stderr
    assert not (exported / "calls").exists()
    steps = [line.split(" ", 1)[1] for line in ran.stderr.splitlines() if "rollout" not in line]
    forward = "kubectl -n proof port-forward service/router 18000:8000, then 2 prompts"
    assert steps == [
        "kubectl apply -f stack/base/namespace.yaml",
        "kubectl -n proof create secret generic pdkit (three random keys)",
        "kubectl apply -k stack/overlays/cpu", forward,
        "kubectl apply -k other/overlays/cpu", forward,
        "kubectl apply -k stack/overlays/cpu", forward,
        "kubectl delete -k stack/overlays/cpu --ignore-not-found",
    ]  # fmt: skip


def test_it_passes_where_every_prompt_finds_its_kv(exported: Path) -> None:
    ran = prove(exported, "stack", "cpu")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [HIT, HIT, "proved: cpu in namespace proof"]
    calls = (exported / "calls").read_text().splitlines()
    assert calls[-1] == "kubectl delete -k stack/overlays/cpu --ignore-not-found"
    assert not [line for line in calls if "--from-literal" in line], "no key is an argument"


@pytest.mark.parametrize(
    "trace",
    [HIT.replace("cached=1024", "cached=16"), HIT.replace("producer-10.0.0.1", "-"), "", "tries=2"],
)
def test_it_fails_where_one_does_not_and_deletes_the_stack(exported: Path, trace: str) -> None:
    ran = prove(exported, "stack", "cpu", TRACE=trace)
    assert ran.returncode == 1
    assert "0 of 2 prompts found the KV" in ran.stderr
    assert "delete -k" in (exported / "calls").read_text()


def test_a_namespace_that_is_there_is_left_alone(exported: Path) -> None:
    ran = prove(exported, "stack", "cpu", THERE="yes")
    assert ran.returncode == 3
    assert "the namespace proof exists" in ran.stderr
    assert "delete" not in (exported / "calls").read_text()


def test_another_namespace_to_swap_to_is_refused(exported: Path) -> None:
    (exported / "other" / "base" / "namespace.yaml").write_text("metadata:\n  name: theirs\n")
    ran = prove(exported, "stack", "cpu", "other")
    assert ran.returncode == 2
    assert "deploy export kubernetes --namespace proof -o other" in ran.stderr
    assert not (exported / "calls").exists()


@pytest.mark.parametrize("arguments", [(), ("stack",), ("stack", "rocm"), ("nowhere", "cpu")])
def test_wrong_arguments_do_nothing(exported: Path, arguments: tuple[str, ...]) -> None:
    assert prove(exported, *arguments).returncode == 2
    assert not (exported / "calls").exists()
