"""A program `kubectl` that plays answers, and what a cluster says of a stack and its check."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KUBECTL = Path(sys.executable).with_name("kubectl")
# Put by `write_built` into a folder that is only read: the stand-in need not ask the real one.
_BUILT = "built.yaml"
# Each answer is used once, but the last one of a command again and again. Imports nothing: it is
# started some hundred times.
_PROGRAM = f"""#!{sys.executable} -IS
import sys
folder = __file__.rpartition("/")[0]
words = [one for one in sys.argv[1:] if not one.startswith("-")]
text = "" if sys.stdin.isatty() else sys.stdin.read()
with open(folder + "/calls", "a") as calls:
    calls.write(ascii([sys.argv[1:], text]) + "\\n")
if words[0] == "kustomize":
    print(open(words[1] + "/{_BUILT}", encoding="utf-8").read())
    sys.exit()
with open(folder + "/verbs", "a+") as verbs:
    verbs.write(words[0] + "\\n")
    verbs.seek(0)
    before = verbs.read().split().count(words[0]) - 1
known = eval(open(folder + "/answers").read())
verb = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
answers = known.get(verb, [[0, ""]])
code, text = answers[min(before, len(answers) - 1)]
print(text, end="", file=sys.stderr if code else sys.stdout)
sys.exit(code)
"""
ROLE = "app.kubernetes.io/component"
Answer = tuple[int, str]
# Of `config view --minify`.
VIEW: Answer = (0, json.dumps({"contexts": [{"name": "here", "context": {"namespace": "pdkit"}}]}))


@dataclass(frozen=True)
class Player:
    """The program, and what it was asked."""

    folder: Path

    @property
    def path(self) -> str:
        """PATH with the program before all others."""
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    def plays(self, **answers: Answer | list[Answer]) -> None:
        """Set the answers: command → exit code and text; that of a failure goes to stderr.

        A command may have its first argument with it: `exec producer-0`.
        """
        listed = {verb: one if isinstance(one, list) else [one] for verb, one in answers.items()}
        (self.folder / "answers").write_text(ascii(listed))

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        """Return the arguments of each call, and its input."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [(argv, text) for argv, text in map(ast.literal_eval, lines)]

    @property
    def asked(self) -> list[str]:
        """Return the calls as a person types them."""
        return [" ".join(argv) for argv, _ in self.calls]


def player(folder: Path) -> Player:
    """Put the program into a folder."""
    folder.mkdir()
    (folder / "kubectl").write_text(_PROGRAM)
    (folder / "kubectl").chmod(0o755)
    return Player(folder)


def write_built(folder: Path) -> str:
    """Let the real kubectl build a folder, for the stand-in to play; return what it made."""
    done = subprocess.run(
        (KUBECTL, "kustomize", folder), env={}, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    (folder / _BUILT).write_text(done.stdout, encoding="utf-8")
    return done.stdout


# Of a server that nobody runs.
_CONFIG = """\
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {}}]
"""


def assert_real_one_takes(calls: Sequence[tuple[list[str], str]], folder: Path) -> None:
    """Check that the real kubectl understands these calls: it only finds no server."""
    (folder / "config").write_text(_CONFIG)
    for argv, text in calls:
        done = subprocess.run(
            (KUBECTL, *argv), input=text, env={"KUBECONFIG": str(folder / "config")},
            cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        offline = "config" in argv or "kustomize" in argv
        assert (done.returncode == 0) == offline, done.stderr
        assert offline or "refused" in done.stderr, done.stderr
        if "config" in argv:
            view = json.loads(done.stdout)["contexts"]
            assert view == [{"name": "here", "context": {"cluster": "c", "user": "u"}}]


def listed(*items: Mapping[str, Any]) -> Answer:
    """Return the answer to `get` with these objects."""
    return 0, json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def pod(role: str, name: str, state: Mapping[str, Any], **status: Any) -> dict[str, Any]:
    """Return a pod with one container, as the API server describes it; `state` is of that."""
    container = "engine" if role in ("producer", "consumer") else role
    own = {
        "name": container, "ready": "running" in state, "restartCount": 0, "state": state,
        "image": "registry/engine:1", "imageID": "", "lastState": {},
    }  # fmt: skip
    phase = "Running" if "running" in state else "Pending"
    if "terminated" in state:
        phase = "Failed" if state["terminated"]["exitCode"] else "Succeeded"
    labels = {"app.kubernetes.io/name": "pdkit", "app.kubernetes.io/instance": "pdkit", ROLE: role}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "pdkit", "labels": labels},
        "spec": {"containers": [{"name": container, "image": "registry/engine:1"}]},
        "status": {"phase": phase, "containerStatuses": [own], **status},
    }


def running() -> dict[str, Any]:
    """Return the state of a container that runs."""
    return {"running": {"startedAt": "2026-11-23T12:00:00Z"}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    """Return the state of a container that does not run yet."""
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def ended(code: int, reason: str = "") -> dict[str, Any]:
    """Return the state of a container that has ended."""
    return {
        "terminated": {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}
    }
