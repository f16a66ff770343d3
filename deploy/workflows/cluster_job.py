"""`deploy check --kubernetes`: the Job of an export runs again, and its result comes back."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import yaml

from deploy.assets import yaml_loader
from deploy.errors import (
    CheckFailed,
    MissingImage,
    PdkitError,
    StackLocked,
    StackUnhealthy,
    StateError,
    UsageError,
)
from deploy.planning.engines import DECODE, PREFILL
from deploy.planning.pairs import named_pairs
from deploy.runtime.kubectl import Kubectl
from deploy.stack.cluster.check import NAME
from deploy.stack.cluster.layout import workload
from deploy.stack.cluster.objects import Object
from deploy.stack.cluster.pod_status import (
    OF_CHECK,
    OF_STACK,
    PodSeen,
    job_anew,
    job_end,
    main_container,
    role_of,
)
from deploy.stack.service import ServiceRole, escaped
from deploy.workflows.prepare import Report

_EVERY_S = 2.0
# The Job's own time counts from when the cluster takes it up, and its end is known a little later.
_LATE_S = 60.0
_STAMP = re.compile(r"^\[ *[\d.]+ s\] ")
_REPEAT = re.compile(r"--repeat=([1-9]\d{,8})")
_OPTION = "deploy check --kubernetes"
_LONGEST_BYTES = 100_000  # Linux takes no argument of 128 KiB


def check_by_job(
    kubectl: Kubectl, export: Path | None, report: Report, options: JobOptions
) -> ClusterCheck:
    """Run the Job `check` of a stack, and return its result. The Job stays, for its log.

    Args:
        export: the folder of the export, of its check, or the `stack.json` in it; None runs the
            Job again that the cluster has.

    Raises:
        StateError: no stack or Job is there.
        UsageError: the options name no pair of it.
        StackLocked: a check runs already.
        MissingImage: a node cannot pull the Job's image.
        PdkitError: what the check itself raised, with its exit code; or kubectl failed.
    """
    objects = _exported(kubectl, _check_folder(export)) if export else None
    if objects:
        kubectl = _in_its_namespace(kubectl, _job_of(objects))
    kubectl = kubectl.settled()
    there = kubectl.objects("get", "jobs,pods", OF_STACK)["items"]
    _require_idle(kubectl, there)
    objects = objects or [job_anew(_job_there(kubectl, there))]
    job = _job_of(objects)
    once_s = _limit_s(kubectl, job)
    container = main_container(job["spec"]["template"]["spec"], NAME)
    limit_s = once_s // _repeats(container["command"]) * options.repeat
    job["spec"]["activeDeadlineSeconds"] = limit_s
    # The settings of its last run are left out.
    own = [word for word in container["command"] if not word.startswith("--")]
    container["command"] = [*own, "--json", *job_arguments(options, there)]
    report(f"the Job {NAME} runs in {kubectl.place}, for at most {limit_s} s")
    try:
        _create(kubectl, objects)
        said = _Follower(kubectl, report).result(limit_s + _LATE_S)
    except KeyboardInterrupt:
        report(f"deleting the Job {NAME}")
        with suppress(PdkitError):
            kubectl.run("delete", "job", NAME, "--ignore-not-found", "--wait=false")
        raise
    return result_of(said, kubectl)


def _check_folder(path: Path) -> Path:
    """Return the folder with the Job that a path of an export means."""
    folder = path.parent if path.name == "stack.json" else path
    if (folder / "job.yaml").is_file():
        return folder
    found = sorted(file.parent for file in folder.glob("check/*/job.yaml"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(one.name for one in found)
        raise UsageError(
            f"{path} has the checks of several vendors: {names}", hint=f"{_OPTION} {found[0]}"
        )
    raise UsageError(
        f"{path} is not the folder of an export, or has no check",
        hint=f"deploy export kubernetes -o FOLDER, then {_OPTION} FOLDER",
    )


def _exported(kubectl: Kubectl, folder: Path) -> list[Object]:
    text = kubectl.run("kustomize", str(folder))
    return list(yaml.load_all(text, Loader=yaml_loader()))


def _job_of(objects: Sequence[Object]) -> Object:
    return next(one for one in objects if one["kind"] == "Job")


def _in_its_namespace(kubectl: Kubectl, job: Object) -> Kubectl:
    own = str(job["metadata"]["namespace"])
    if kubectl.namespace not in ("", own):
        raise UsageError(
            f"--namespace {kubectl.namespace}: the export is for the namespace {own}",
            hint=f"leave --namespace out, or deploy export kubernetes "
            f"--namespace {kubectl.namespace} -o FOLDER",
        )
    return replace(kubectl, namespace=own)


def _require_idle(kubectl: Kubectl, there: Sequence[Object]) -> None:
    """Refuse where no stack is, or where a check's pod runs; one that only waits is replaced."""
    pods = [one for one in there if one["kind"] == "Pod"]
    if all(role_of(pod) == NAME for pod in pods):
        raise no_stack(kubectl, _OPTION)
    if any(PodSeen.read(pod).runs for pod in pods if role_of(pod) == NAME):
        raise StackLocked(
            f"a check of the stack in {kubectl.place} is already running",
            hint=f"{kubectl.typed(f'logs -f job/{NAME}')}, or end it: "
            f"{kubectl.typed(f'delete job {NAME}')}",
        )


def no_stack(kubectl: Kubectl, command: str) -> StateError:
    """Return the error of a namespace without pods of a stack."""
    return StateError(
        f"no pods of a stack in {kubectl.place}",
        hint=f"kubectl apply -k FOLDER/overlays/VENDOR, or {command} --namespace NAME",
    )


def _job_there(kubectl: Kubectl, there: Sequence[Object]) -> Object:
    for one in there:
        if one["kind"] == "Job" and one["metadata"]["name"] == NAME:
            return one
    raise StateError(f"no Job {NAME} in {kubectl.place}", hint=f"{_OPTION} FOLDER_OF_THE_EXPORT")


def _limit_s(kubectl: Kubectl, job: Object) -> int:
    """Return the seconds that the Job of an export may take."""
    limit_s = job["spec"].get("activeDeadlineSeconds")
    if limit_s and main_container(job["spec"]["template"]["spec"], NAME).get("command"):
        return int(limit_s)
    raise StateError(
        f"the Job {NAME} in {kubectl.place} is not that of an export",
        hint=f"{_OPTION} FOLDER_OF_THE_EXPORT",
    )


def _repeats(command: Sequence[str]) -> int:
    """Return the number of runs for which a Job has time."""
    found = (_REPEAT.fullmatch(word) for word in command)
    return next((int(one[1]) for one in found if one), 1)


def _create(kubectl: Kubectl, objects: Sequence[Object]) -> None:
    """Create the Job, and what it needs where that is given; Kubernetes does not let it change."""
    kubectl.run(
        "delete", "job", NAME, "--ignore-not-found", "--cascade=foreground", "--timeout=90s",
        "--request-timeout=90s",
    )  # fmt: skip
    together = {"apiVersion": "v1", "kind": "List", "items": objects}
    kubectl.run("apply", "--filename=-", text=json.dumps(together))


class _Follower:
    """Waits for the Job's result. Connections may break; what was told is not told again."""

    def __init__(self, kubectl: Kubectl, report: Report) -> None:
        self._kubectl = kubectl
        self._report = report
        self._lines = 0
        self._told = ""

    def result(self, within_s: float) -> Object:
        """Return the last lines of the Job's program."""
        deadline = time.monotonic() + within_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                end = self._end(left_s)
            except PdkitError as exc:
                if left_s < 0:
                    raise
                self._tell(f"{exc.message}; trying again")
                end = None
            if isinstance(end, PdkitError):
                raise end
            if end:
                return end
            if left_s < 0:
                raise StackUnhealthy(
                    f"the Job {NAME} has not ended within {within_s:g} s",
                    hint=self._kubectl.typed(f"describe pods {OF_CHECK}"),
                )
            time.sleep(_EVERY_S)

    def _end(self, left_s: float) -> Object | PdkitError | None:
        """Return the result, or the reason why it is missing; None while it may still come."""
        items = self._kubectl.objects("get", "jobs,pods", OF_CHECK)["items"]
        job = next((one for one in items if one["kind"] == "Job"), None)
        pods = [PodSeen.read(one) for one in items if one["kind"] == "Pod"]
        pod = pods[-1] if pods else None
        if pod and (pod.runs or pod.exit_code is not None):
            if said := self._log(pod, left_s):
                return said
        elif pod and pod.lacks_image:
            return MissingImage(
                f"the check's pod has no image: {pod.why}",
                hint="push it where the nodes pull from, or name another one: "
                "deploy export kubernetes --image IMAGE -o FOLDER",
            )
        else:
            self._tell(f"waiting for the check's pod{f': {pod.why}' if pod and pod.why else ''}")
        return self._no_result(job, pod)

    def _log(self, pod: PodSeen, left_s: float) -> Object | None:
        """Follow the log, and report its lines; return the result, or None if it ends without."""
        follow = ("logs", "--follow", pod.name, f"--container={NAME}")
        for number, line in enumerate(self._kubectl.lines(*follow, within_s=max(left_s, 1))):
            if said := said_by(line):
                return said
            if number >= self._lines:
                self._lines = number + 1
                self._report(_STAMP.sub("", line))
        return None

    def _tell(self, line: str) -> None:
        if line != self._told:
            self._report(line)
        self._told = line

    def _no_result(self, job: Object | None, pod: PodSeen | None) -> PdkitError | None:
        """Return the error of a Job that ended without a result."""
        if pod and pod.exit_code is not None:
            error = StackUnhealthy(
                f"the check's pod ended with {pod.exit_code} ({pod.why}) and without a result that "
                "this version of pdkit can read",
                hint=f"{self._kubectl.typed(f'logs job/{NAME}')}; if an older pdkit exported it: "
                f"deploy export kubernetes -o FOLDER, then {_OPTION} FOLDER",
            )
            error.exit_code = pod.exit_code or error.exit_code
            return error
        end = job_end(job) if job else "it was deleted"
        if not end:
            return None
        hint = self._kubectl.typed(f"describe job {NAME}") if job else _OPTION
        return StackUnhealthy(f"the Job {NAME} ended without a result: {end}", hint=hint)


@dataclass(frozen=True)
class ClusterCheck:
    """The result of a check inside a cluster: what `deploy check` would show and return there.

    Attributes:
        junit: the findings as XML; "" if they were not asked for.
    """

    data: dict[str, Any]
    text: str
    errors: Sequence[CheckFailed]
    junit: str


def said_by(line: str) -> Object | None:
    """Parse a line of the log that is for programs; None if it is for people."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and said.keys() & {"data", "error"} else None


def result_of(said: Object, kubectl: Kubectl) -> ClusterCheck:
    """Return the result; raise the check's own error, with its code, where it ended with one."""
    try:
        return _read(said, kubectl)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise StackUnhealthy(
            f"this version of pdkit cannot read the result of the Job {NAME} ({exc!r})",
            hint=kubectl.typed(f"logs job/{NAME}"),
        ) from exc


def _read(said: Object, kubectl: Kubectl) -> ClusterCheck:
    if told := said.get("error"):
        details = tuple(map(str, told["details"]))
        error = PdkitError(str(told["message"]), hint=str(told["hint"]), details=details)
        error.code, error.exit_code = str(told["code"]), int(told["exit_code"])
        raise error
    data, text, junit = said["data"], str(said["text"]), str(said.get("junit", ""))
    if data["passed"]:
        return ClusterCheck(data, text, (), junit)
    hint = kubectl.typed(f"logs {OF_STACK} --prefix")
    if data["diagnosis"]:
        hint = data["diagnosis"][0]["hint"]
    return ClusterCheck(data, text, [CheckFailed(data["failures"][0], hint=hint)], junit)


@dataclass(frozen=True)
class JobOptions:
    """What is checked; like `CheckOptions`, but its pairs are those of pods.

    Attributes:
        pairs: patterns such as 'producer-0:*'; none means all pairs.
        repeat: number of runs in a row.
        junit: what JUnit XML calls the stack; "" if none is wanted.
    """

    pairs: Sequence[str] = ()
    quick: bool = False
    least: float = 1.0
    prompt: str | None = None
    repeat: int = 1
    junit: str = ""


def job_arguments(options: JobOptions, there: Sequence[Object]) -> list[str]:
    """Return the arguments of the Job's program.

    Args:
        there: the stack's pods, among other objects.

    Raises:
        UsageError: a pattern names no pair of them, or the prompt is too long.
    """
    pairs = dict(_pairs(there)) if options.pairs else {}
    named = named_pairs(pairs, options.pairs, hint="deploy check --kubernetes --pairs '*:*'")
    return [
        *(f"--pairs={pair}" for pair in named),
        *(["--quick"] if options.quick else []),
        *([f"--min-hit-rate={options.least}"] if options.least < 1 else []),
        *([f"--prompt={_argument(options.prompt)}"] if options.prompt is not None else []),
        *([f"--repeat={options.repeat}"] if options.repeat > 1 else []),
        *([f"--junit={options.junit}"] if options.junit else []),
    ]


def _argument(prompt: str) -> str:
    size = len(prompt.encode())
    if size > _LONGEST_BYTES:
        raise UsageError(
            f"--prompt-file: {size} bytes; with --kubernetes, at most {_LONGEST_BYTES}",
            hint="use a shorter prompt",
        )
    return escaped(prompt)


def _pairs(there: Sequence[Object]) -> Iterator[tuple[str, str]]:
    """Yield each pair by the names of its pods, and by their addresses."""
    engines = [one for one in there if one["kind"] == "Pod" and one["status"].get("podIP")]
    for pair in permutations(engines, 2):
        producer, consumer = map(role_of, pair)
        if producer in PREFILL and consumer in DECODE:
            name = ":".join(one["metadata"]["name"] for one in pair)
            yield name, ":".join(_engine_name(one) for one in pair)


def _engine_name(pod: Object) -> str:
    """Return an engine's name as the check inside the cluster has it."""
    role = cast(ServiceRole, role_of(pod))
    return f"{workload(role)}-{pod['status']['podIP']}"
