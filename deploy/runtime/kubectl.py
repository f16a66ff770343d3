"""The `kubectl` command: in one context and one namespace, with limits of time and output."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any

from deploy.errors import MachineError, MissingTool, PdkitError, StateError, UsageError

_REQUEST = "--request-timeout=30s"
_LIMIT_S = 150.0
# A thousand pods take some 20 MiB; what comes out of a pod may have no end.
_MOST_BYTES = 64 << 20
_LINE = 500  # of what kubectl says where it fails
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
        """Run a command that prints JSON and return it. Raises as `run` does."""
        return dict(json.loads(self.run(*arguments, "--output=json")))

    def run(self, *arguments: str, text: str = "", most_bytes: int = _MOST_BYTES) -> str:
        """Run a command with a text as its input; return what it printed.

        Raises:
            MissingTool: there is no kubectl.
            PdkitError: it failed, did not end in time, or printed more than it may.
        """
        with (
            ThreadPoolExecutor(2) as pool,
            self._started(_LIMIT_S, _REQUEST, *arguments) as process,
        ):
            pipes = (process.stdout, process.stderr)
            told = [pool.submit(_all_of, pipe, most_bytes, process) for pipe in pipes]
            assert process.stdin  # noqa: S101 - it is a pipe
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(text)
            printed, said = (one.result() for one in told)
            code = process.wait()
        if code < 0:
            much = max(len(printed), len(said)) > most_bytes
            why = (
                f"printed more than {most_bytes >> 20} MiB"
                if much
                else f"timed out after {_LIMIT_S:g} s"
            )
            raise MachineError(
                f"kubectl {arguments[0]} was stopped: it {why}", hint=self.typed("cluster-info")
            )
        if code:
            raise self._failure(arguments, said)
        return printed

    def lines(self, *arguments: str, within_s: float) -> Iterator[str]:
        """Yield the output of a command, line by line, until it ends or its time is over.

        Raises:
            PdkitError: it failed.
        """
        with self._started(within_s, *arguments) as process:
            assert process.stdin and process.stdout and process.stderr  # noqa: S101 - pipes
            process.stdin.close()
            lines = iter(partial(process.stdout.readline, _MOST_BYTES), "")
            yield from (line.rstrip("\n") for line in lines)
            said = process.stderr.read(_MOST_BYTES)
            code = process.wait()
        if code > 0:  # its time over, it was killed
            raise self._failure(arguments, said)

    @contextmanager
    def _started(self, within_s: float, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command until the context ends, or its time is over."""
        try:
            process = subprocess.Popen(
                (*self.words, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C is for pdkit alone
            )
        except FileNotFoundError as exc:
            raise _missing() from exc
        over = threading.Timer(within_s, _kill, (process,))
        over.daemon = True
        over.start()
        with process:
            try:
                yield process
            finally:  # also where the caller has read enough
                over.cancel()
                _kill(process)

    def _failure(self, arguments: tuple[str, ...], said: str) -> PdkitError:
        spoken = (line.strip()[:_LINE] for line in said.splitlines())
        lines = [line for line in spoken if line] or ["no output"]
        message = f"kubectl {arguments[0]}: {lines[-1].removeprefix('error: ')}"
        for pattern, kind, hint in _KNOWN:
            if re.search(pattern, lines[-1], re.IGNORECASE):
                return kind(message, hint=hint.format(kubectl=shlex.join(self.words)))
        return MachineError(
            message, hint=self.typed(shlex.join(arguments)), details=tuple(lines[-8:-1])
        )


def _all_of(pipe: IO[str] | None, most: int, process: subprocess.Popen[str]) -> str:
    """Read a process's pipe to the end; end the process if it writes too much."""
    assert pipe  # noqa: S101 - it is there
    said = pipe.read(most + 1)
    if len(said) > most:
        _kill(process)
    return said


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process, and what it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _missing() -> MissingTool:
    return MissingTool(
        "the command kubectl is not installed", hint="https://kubernetes.io/docs/tasks/tools"
    )
