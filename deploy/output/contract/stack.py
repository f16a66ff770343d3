"""The data of the commands on a stack: plan, start, look at, change and stop it."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from deploy.verify.report import CheckReport


class Exported(TypedDict):
    """A folder for another place than this machine.

    Attributes:
        pods: vendor → workload → number of pods.
        images: images that nodes must be able to pull.
        notes: what was assumed.
        then: the commands to type next.
    """

    namespace: str
    files: list[str]
    pods: dict[str, dict[str, int]]
    images: list[str]
    notes: list[str]
    then: list[str]


class Up(TypedDict):
    """A start.

    Attributes:
        url: the address for clients.
        started: service → seconds until it was ready; empty if all ran already.
        slowest_engine_s: seconds of the slowest engine's start.
        check: null with `--no-check`.
        warnings: why supervisor or monitoring do not run, if they should.
    """

    name: str
    url: str
    model: str
    started: dict[str, float]
    slowest_engine_s: float
    ready_s: float
    total_s: float
    check: CheckReport | None
    warnings: list[str]


class Drained(TypedDict):
    """`deploy drain` and `undrain`.

    Attributes:
        drained: the engine gets no new requests.
    """

    name: str
    engine: str
    drained: bool


class Written(TypedDict):
    """`deploy init`.

    Attributes:
        file: the file that was written.
        settings: the settings in it.
        found: what this machine has, in words.
        cached_models: Hugging Face models that are cached here.
    """

    file: str
    settings: dict[str, Any]
    found: str
    cached_models: list[str]


class LogLine(TypedDict):
    """One line of a log."""

    service: str
    line: str


class Logs(TypedDict):
    """The last lines of logs.

    Attributes:
        files: service → the file, or the command that shows it.
    """

    files: dict[str, str]
    lines: list[LogLine]
