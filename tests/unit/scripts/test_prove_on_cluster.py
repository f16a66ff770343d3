"""`scripts/prove-on-cluster`: what it would do, and what it does with a kubectl that answers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.scripts.conftest import ROOT

SCRIPT = ROOT / "scripts" / "prove-on-cluster"
# Answers as for a Job whose check ends with FAILS, or passes, at the ENDS_ATth question;
# HANGS is a command that fails. Time passes only while the script sleeps.
_KUBECTL = """#!/bin/bash
echo "kubectl $*" >>"$CALLS"
case "$*" in *"${HANGS:-no such command}"*) exit 1 ;; esac
case "$*" in
"get namespace"*) [ -n "${THERE:-}" ] ;;
*"create secret"*) cat "${!##--from-env-file=}" >>"$CALLS.keys" ;;
*"logs -f job/check"*)
    [ "$(grep -c "logs -f" "$CALLS")" -lt "${SPEAKS_AT:-1}" ] || echo "check ended"
    ;;
*"logs -l"*) echo "an engine's last words" ;;
*"get job check"*)
    if [ "$(grep -c "get job check" "$CALLS")" -lt "${ENDS_AT:-1}" ]; then exit; fi
    if [ -n "${FAILS+set}" ]; then echo FailureTarget Failed; else echo Complete; fi
    ;;
*"get pods"*"jsonpath"*) printf '%s' "$FAILS" ;;
esac
"""
_STAND_INS = {
    "kubectl": _KUBECTL,
    "sleep": '#!/bin/bash\necho "sleep $1" >>"$CALLS.slept"\n',
    "date": """#!/bin/bash
awk '{ slept += $2 } END { print 1000 + slept }' "$CALLS.slept" 2>/dev/null || echo 1000
""",
}
_ASKED = (
    "-n proof get job check --request-timeout=30s"
    ' -o jsonpath={.status.conditions[?(@.status=="True")].type}'
)
SERVE = ("rollout status statefulset/producer", "rollout status statefulset/consumer",
         "rollout status deployment/router")  # fmt: skip


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    for name in ("stack", "other"):
        base = tmp_path / name / "base"
        base.mkdir(parents=True)
        (base / "namespace.yaml").write_text("kind: Namespace\nmetadata:\n  name: proof\n")
        for role in ("producer", "consumer"):
            (base / f"{role}.yaml").write_text("kind: StatefulSet\n---\nkind: Service\n")
        for part in ("overlays", "check"):
            (tmp_path / name / part / "cpu").mkdir(parents=True)
            (tmp_path / name / part / "cpu" / "kustomization.yaml").touch()
        job = tmp_path / name / "check" / "cpu" / "job.yaml"
        job.write_text("kind: Job\nspec:\n  activeDeadlineSeconds: 30\n")
    (tmp_path / "bin").mkdir()
    for program, text in _STAND_INS.items():
        (tmp_path / "bin" / program).write_text(text)
        (tmp_path / "bin" / program).chmod(0o755)
    return tmp_path


def prove(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    known = {"PATH": path, "CALLS": str(folder / "calls"), "DRY_RUN": ""}
    return subprocess.run(
        (str(SCRIPT), *arguments),
        cwd=folder, env={**os.environ, **known, **env}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def calls(folder: Path) -> list[str]:
    return [line.removeprefix("kubectl ") for line in (folder / "calls").read_text().splitlines()]


def serving(folder: str) -> list[str]:
    waits = (f"-n proof {wait} --timeout=1800s" for wait in SERVE)
    return [f"apply -k {folder}/overlays/cpu", *waits]


def checking(folder: str) -> list[str]:
    return [
        f"apply -k {folder}/check/cpu",
        "-n proof logs -f job/check --pod-running-timeout=30s --request-timeout=30s",
        _ASKED,
        f"delete -k {folder}/check/cpu",
    ]


BEGIN = ["apply -f stack/base/namespace.yaml"]
END = ["delete -k stack/overlays/cpu --ignore-not-found"]
EVIDENCE = [
    "-n proof get pods -o wide",
    "-n proof logs -l app.kubernetes.io/name=pdkit --all-containers --prefix --ignore-errors"
    " --tail=200",
]


@pytest.mark.parametrize(("options", "env"), [(("--dry-run",), {}), ((), {"DRY_RUN": "1"})])
def test_a_dry_run_says_all_steps_and_takes_none(
    exported: Path, options: tuple[str, ...], env: dict[str, str]
) -> None:
    ran = prove(exported, *options, "stack", "cpu", "other", **env)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "", "nothing passed"
    assert not (exported / "calls").exists()
    steps = [line.removeprefix("+ kubectl ") for line in ran.stderr.splitlines()]
    assert steps == [
        *BEGIN,
        "-n proof create secret generic pdkit (four random keys)",
        *serving("stack"), *checking("stack"),
        *serving("other"), *checking("other"),
        *serving("stack"), *checking("stack"),
        *END,
    ]  # fmt: skip


def test_the_dry_run_lists_the_steps_that_run(exported: Path) -> None:
    ran = prove(exported, "stack", "cpu", "other")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == 3 * ["check ended"] + ["passed: cpu in namespace proof"]
    said = prove(exported, "--dry-run", "stack", "cpu", "other").stderr.splitlines()
    did = [one for one in calls(exported) if "secret" not in one and "get namespace" not in one]
    assert did == [one.removeprefix("+ kubectl ") for one in said if "secret" not in one]
    assert not [line for line in calls(exported) if "--from-literal" in line], "no key is shown"


@pytest.mark.parametrize(("code", "ends"), [("1", 1), ("4", 4), ("70", 70), ("", 1)])
def test_a_failed_check_is_the_exit_code_and_the_stack_is_deleted(
    exported: Path, code: str, ends: int
) -> None:
    # "" is a pod that never ran.
    ran = prove(exported, "stack", "cpu", "other", FAILS=code)
    assert ran.returncode == ends
    assert "the stack of stack failed its check" in ran.stderr
    assert "passed" not in ran.stdout
    assert calls(exported)[-3:] == [*EVIDENCE, *END]
    assert "an engine's last words" in ran.stderr
    assert "delete" not in "".join(calls(exported)[:-1])
    assert not [one for one in calls(exported) if "other" in one]


@pytest.mark.parametrize("step", ["apply -k stack/overlays", "rollout status", "create secret"])
def test_a_step_that_fails_ends_it_and_deletes_the_stack(exported: Path, step: str) -> None:
    ran = prove(exported, "stack", "cpu", HANGS=step)
    assert ran.returncode == 1
    assert "passed" not in ran.stdout
    assert calls(exported)[-3:] == [*EVIDENCE, *END]
    assert not [one for one in calls(exported) if "job/check" in one]


def test_a_log_that_breaks_off_is_not_a_failed_check(exported: Path) -> None:
    ran = prove(exported, "stack", "cpu", HANGS="logs -f", ENDS_AT="3")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "passed: cpu in namespace proof\n"
    again = checking("stack")[1:3]
    assert calls(exported)[-8:] == [*3 * again, *checking("stack")[3:], *END]
    assert (exported / "calls.slept").read_text() == 2 * "sleep 2\n"


def test_a_log_that_ends_before_it_begins_is_asked_for_again(exported: Path) -> None:
    ran = prove(exported, "stack", "cpu", SPEAKS_AT="2", ENDS_AT="3")
    assert ran.stdout.splitlines() == ["check ended", "passed: cpu in namespace proof"]


def test_a_log_that_was_printed_is_not_printed_again(exported: Path) -> None:
    ran = prove(exported, "stack", "cpu", ENDS_AT="3")
    assert ran.stdout.splitlines() == ["check ended", "passed: cpu in namespace proof"]


@pytest.mark.parametrize("hangs", ["logs -f", "get job check"])
def test_a_job_that_never_ends_is_given_up_after_its_own_limit(exported: Path, hangs: str) -> None:
    ran = prove(exported, "stack", "cpu", ENDS_AT="1000", HANGS=hangs)
    assert ran.returncode == 1
    assert "the check of stack has not ended within its 30 s" in ran.stderr
    assert calls(exported)[-3:] == [*EVIDENCE, *END]
    slept = (exported / "calls.slept").read_text().split()[1::2]
    assert sum(map(int, slept)) == 30 + 60, "it takes a little to know of the end"


def test_the_secret_has_every_key_that_an_export_may_need(exported: Path) -> None:
    assert prove(exported, "stack", "cpu").returncode == 0
    keys = dict(line.split("=") for line in (exported / "calls.keys").read_text().splitlines())
    assert keys.keys() == {"api_key", "engine_key", "kv_key", "redis_password"}
    assert {len(key) for key in keys.values()} == {64}
    assert len(set(keys.values())) == 4


@pytest.mark.parametrize("folder", ["stack", "other"])
def test_a_redis_of_ones_own_is_refused(exported: Path, folder: str) -> None:
    file = exported / folder / "base" / "consumer.yaml"
    file.write_text(file.read_text() + "          - key: redis_url\n            path: redis_url\n")
    ran = prove(exported, "stack", "cpu", "other")
    assert ran.returncode == 2
    assert f"{folder} needs the URL of a Redis of your own" in ran.stderr
    assert not (exported / "calls").exists()


def test_the_connectors_own_file_does_not_count_as_a_users_redis(exported: Path) -> None:
    file = exported / "stack" / "base" / "consumer.yaml"
    file.write_text(file.read_text() + "      - key: pdkit_connector.redis_url.py\n")
    assert prove(exported, "stack", "cpu").returncode == 0


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


def test_aggregated_engines_are_awaited_too(exported: Path) -> None:
    base = exported / "stack" / "base"
    (base / "producer.yaml").unlink()
    (base / "consumer.yaml").rename(base / "engine.yaml")
    ran = prove(exported, "stack", "cpu")
    assert ran.returncode == 0, ran.stderr
    waited = [one.split()[4] for one in calls(exported) if "rollout" in one]
    assert waited == ["statefulset/engine", "deployment/router"]


def test_a_disaggregated_set_is_refused(exported: Path) -> None:
    for role in ("producer", "consumer"):
        (exported / "stack" / "base" / f"{role}.yaml").write_text("kind: Service\n")
    ran = prove(exported, "stack", "cpu")
    assert ran.returncode == 2
    assert "--flavour plain" in ran.stderr
    assert not (exported / "calls").exists()


@pytest.mark.parametrize(
    "arguments", [(), ("stack",), ("stack", "rocm"), ("nowhere", "cpu"), ("--dry-run", "stack")]
)
def test_wrong_arguments_do_nothing(exported: Path, arguments: tuple[str, ...]) -> None:
    assert prove(exported, *arguments).returncode == 2
    assert not (exported / "calls").exists()


def test_a_folder_without_a_check_is_refused(exported: Path) -> None:
    """An export of an older pdkit."""
    (exported / "stack" / "check" / "cpu" / "kustomization.yaml").unlink()
    ran = prove(exported, "stack", "cpu")
    assert ran.returncode == 2
    assert "check/cpu; write them: deploy export kubernetes" in ran.stderr
