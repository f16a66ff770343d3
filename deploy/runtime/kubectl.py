"""The `kubectl` command: in one context and one namespace, and always with a deadline."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from deploy.errors import MachineError, MissingTool, PdkitError, StateError, UsageError

_REQUEST = "--request-timeout=30s"
_LIMIT_S = 150.0
# What kubectl says, the error that it means, and what to type next.
_KNOWN: tuple[tuple[str, type[PdkitError], str], ...] = (
    (r"cannot locate context|context .*does not exist", UsageError, "kubectl config get-contexts"),
    (r"current-context must exist", StateError, "kubectl config use-context NAME"),
    (r"namespaces? .* not found", StateError, "{kubectl} get namespaces"),
    (r"forbidden|unauthorized|must be logged in", MachineError, "{kubectl} auth can-i --list"),
    (
        r"refused|unable to connect|no such host|timed out|i/o timeout|deadline exceeded",
        MachineError,
        "{kubectl} cluster-info",
    ),
)


@dataclass(frozen=True)
class Kubectl:
    """The command, and what it is told of the cluster; "" is whatever is current."""

    context: str = ""
    namespace: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The command with its context and namespace."""
        told = {"--context": self.context, "--namespace": self.namespace}
        return ("kubectl", *(f"{option}={value}" for option, value in told.items() if value))

    @property
    def place(self) -> str:
        """The namespace and the context, in words."""
        space = f"namespace {self.namespace}" if self.namespace else "kubectl's namespace"
        return space + (f" of {self.context}" if self.context else "")

    def typed(self, arguments: str) -> str:
        """Return a command for the user to type."""
        return f"{shlex.join(self.words)} {arguments}"

    def settled(self) -> Kubectl:
        """Return the same with both named: what is current may be switched in another terminal.

        Raises:
            UsageError: there is no such context.
            MissingTool: there is no kubectl.
        """
        try:
            view = self.objects("config", "view", "--minify")
        except StateError:  # as in a pod, which needs no context
            return self
        (context,) = view["contexts"]
        own = self.namespace or context["context"].get("namespace", "default")
        return replace(self, context=context["name"], namespace=own)

    def objects(self, *arguments: str) -> dict[str, Any]:
        """Return what a command prints as JSON. Raises as `run` does."""
        return dict(json.loads(self.run(*arguments, "--output=json")))

    def run(self, *arguments: str, text: str = "") -> str:
        """Run a command with a text as its input; return what it printed.

        Raises:
            MissingTool: there is no kubectl.
            PdkitError: it failed, or did not end in time.
        """
        try:
            done = subprocess.run(
                (*self.words, _REQUEST, *arguments),
                input=text,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_LIMIT_S,
                check=False,
                start_new_session=True,  # Ctrl-C is for pdkit alone
            )
        except FileNotFoundError as exc:
            raise _missing() from exc
        except subprocess.TimeoutExpired as exc:
            raise MachineError(
                f"kubectl {arguments[0]} did not end within {_LIMIT_S:g} s",
                hint=self.typed("cluster-info"),
            ) from exc
        if done.returncode:
            raise self._failure(arguments, done.stderr)
        return done.stdout

    def lines(self, *arguments: str, within_s: float) -> Iterator[str]:
        """Yield what a command prints, line by line, until it ends or its time is over.

        Raises:
            PdkitError: it failed.
        """
        process = subprocess.Popen(
            (*self.words, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        over = threading.Timer(within_s, process.kill)
        over.daemon = True
        over.start()
        with process:
            assert process.stdout and process.stderr  # noqa: S101 - they are pipes
            try:
                yield from (line.rstrip("\n") for line in process.stdout)
                said = process.stderr.read()
                process.wait()  # which the timer ends
            finally:  # also where the caller has read enough
                over.cancel()
                process.kill()
        if process.returncode > 0:
            raise self._failure(arguments, said)

    def _failure(self, arguments: tuple[str, ...], said: str) -> PdkitError:
        lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no output"]
        message = f"kubectl {arguments[0]}: {lines[-1].removeprefix('error: ')}"
        for pattern, kind, hint in _KNOWN:
            if re.search(pattern, lines[-1], re.IGNORECASE):
                return kind(message, hint=hint.format(kubectl=shlex.join(self.words)))
        return MachineError(
            message, hint=self.typed(shlex.join(arguments)), details=tuple(lines[-8:-1])
        )


def _missing() -> MissingTool:
    return MissingTool(
        "the command kubectl is not installed", hint="https://kubernetes.io/docs/tasks/tools"
    )
