"""The errors shown to users.

Each has a message (what is wrong, with field and value), a hint (the next command to type), a
stable code for scripts, and an exit code. Only the CLI boundary turns them into text.

    PdkitError
    ├── CheckFailed             1  the stack is up, but a check failed
    ├── UsageError              2  a flag, an environment variable, deploy.yaml, or stored state
    │   ├── ConfigError            an invalid value, or one that contradicts another
    │   └── StateError             a state file that is broken or contradicts the request
    │       └── ModelChanged       the model's files have changed since the stack loaded them
    ├── MachineError            3  something this machine lacks
    │   ├── MissingTool            no redis-server, engine Python or package
    │   ├── PortTaken              a port of the stack is in use by something else
    │   ├── NotEnoughMemory        less memory than the plan expects
    │   ├── MissingGpus            fewer GPUs than requested, or containers cannot get them
    │   ├── MissingImage           an image is not here and cannot be pulled or built
    │   ├── MissingModel           a Hugging Face model is not here and cannot be downloaded
    │   ├── MachineUnfit           a disk, driver, permission or limit prevents every start
    │   ├── RedisUnreachable       your own Redis does not answer or refuses access
    │   ├── EngineUnreachable      an engine of another host does not answer
    │   ├── FixFailed              the connector cannot fix a bug of this LMCache
    │   ├── DockerUnavailable      no Docker engine answers, or its Compose plugin is too old
    │   └── StackLocked            another deploy command works on the same stack
    ├── StackUnhealthy          4  a service died, or was not ready by its deadline
    │   ├── OutOfMemory            the kernel killed a service that ran out of memory
    │   └── SwapFailed             the new image or connector failed; the old stack was restored
    └── Interrupted           130  Ctrl-C or SIGTERM
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# What to change in a command line: option → its new value, or None to leave it out.
Changes = Mapping[str, str | None]
# A hint: the help of the command that was typed.
HELP = "--help"
# Settings of deploy.yaml that no option sets; nested ones have none either.
NO_OPTION = frozenset({"gpu_access", "hub_cache", "hf_token_file", "supervise"})
# Characters that XML forbids or a terminal would interpret. Named one by one: their complement
# takes ten times as long to compile.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class NamedSetting:
    """A setting that a message names: 'tp', or 'redis.shards'."""

    name: str

    def called(self, origins: Mapping[str, str]) -> str:
        """Return the setting as the user wrote it: an option, a variable or the key of a file."""
        origin = origins.get(self.name.partition(".")[0], "")
        if origin.startswith(("--", "PDKIT_")):
            return origin
        has_option = "." not in self.name and self.name not in NO_OPTION
        return f"--{self.name.replace('_', '-')}" if has_option and not origin else self.name

    def at_the_start(self, origins: Mapping[str, str]) -> str:
        """Return the same, after the file that has it."""
        called, origin = self.called(origins), origins.get(self.name.partition(".")[0], "")
        return f"{origin}: {called}" if origin and called == self.name else called


Words = tuple[str | NamedSetting, ...]


class PdkitError(Exception):
    """Base of all errors meant for the user.

    Attributes:
        words: the message; the settings in it are values, named by their origins where those are
            known (`name_origins`).
        setting: the one that is wrong; "" if none is.
        reason: the message without the name of that setting.
        retry: changes to the stack options, each of which fixes it. The hint names them; the
            boundary applies them to the command that was typed.
        gives: what each of `retry` was found to give; empty if that is unknown.
        otherwise: the rest of the hint.
    """

    code = "error"
    exit_code = 1

    def __init__(
        self,
        message: str | Words,
        *,
        setting: str = "",
        hint: str = "",
        details: tuple[str, ...] = (),
        retry: tuple[Changes, ...] = (),
        note: str = "",
    ) -> None:
        """Make an error.

        Args:
            setting: the one that is wrong; the message begins with it.
            hint: the next command to type, or HELP.
            note: what to know about the commands of `retry`.
        """
        words = (message,) if isinstance(message, str) else message
        self.setting, self.reason = setting, worded(words, {})
        self.words: Words = (NamedSetting(setting), ": ", *words) if setting else words
        self.message = worded(self.words, {})
        super().__init__(self.message)
        self.details = details
        self.retry = retry
        self.gives: tuple[str, ...] = ()
        self.otherwise = hint
        self.note = note
        self.hint = self.hint_for("plan")

    def with_retry(self, retry: tuple[Changes, ...], gives: tuple[str, ...]) -> PdkitError:
        """Return the same error with other changes, and what each of them gives."""
        error = type(self)(
            self.words, details=self.details, retry=retry, hint=self.otherwise, note=self.note
        )
        error.setting, error.reason, error.gives = self.setting, self.reason, gives
        error.hint = error.hint_for("plan")
        return error

    def name_origins(self, origins: Mapping[str, str]) -> None:
        """Name settings the way the user set them: setting → '--tp', 'PDKIT_TP' or a file."""
        self.message = worded(self.words, origins)

    def hint_for(self, command: str) -> str:
        """Return the hint for a command."""
        if self.otherwise == HELP:
            return f"deploy {command} --help"
        return self.hint_by([f"deploy {command} {options_text(one)}" for one in self.retry])

    def hint_by(self, commands: list[str]) -> str:
        """Return the hint with these commands for `retry`."""
        if self.gives:
            pairs = zip(commands, self.gives, strict=True)
            commands = [f"{command} ({gives})" for command, gives in pairs]
        noted = [", or ".join(commands) + (f", {self.note}" if self.note else "")]
        return ", or ".join(filter(None, [*noted, self.otherwise]))

    def as_dict(self) -> dict[str, object]:
        """Return the JSON shape: code, message, hint, details (lines, such as a log's last)."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "details": list(self.details),
        }


def worded(words: Words, origins: Mapping[str, str]) -> str:
    """Return a message with its settings named by their origins."""
    first, *rest = words
    head = first.at_the_start(origins) if isinstance(first, NamedSetting) else first
    return head + "".join(
        one.called(origins) if isinstance(one, NamedSetting) else one for one in rest
    )


def printable(text: str) -> str:
    """Return text without the characters that a terminal or XML cannot take."""
    return _CONTROLS.sub("", text)


def options_text(changes: Changes) -> str:
    """Return the options that are set, as they are typed."""
    return " ".join(f"{option} {value}" for option, value in changes.items() if value is not None)


class CheckFailed(PdkitError):
    """The stack serves, and its KV is not reused or not right."""

    code = "check_failed"
    exit_code = 1


class UsageError(PdkitError):
    """The command line is wrong: an option, a value, or options that exclude each other."""

    code = "usage"
    exit_code = 2


class ConfigError(UsageError):
    """A setting is wrong, or contradicts another, the model or the machine."""

    code = "config"


class StateError(UsageError):
    """There is no such stack, or it is not in a state in which the command makes sense."""

    code = "state"


class ModelChanged(StateError):
    """The model's folder has other files than those that the stack was started with."""

    code = "model_changed"


class MachineError(PdkitError):
    """This machine lacks something, or something on it is in the way."""

    code = "machine"
    exit_code = 3


class MissingTool(MachineError):
    """A program or library that the stack needs is not installed."""

    code = "missing_tool"


class PortTaken(MachineError):
    """Another program listens on a port of the stack."""

    code = "port_taken"


class NotEnoughMemory(MachineError):
    """The stack is expected to need more host memory than is available."""

    code = "not_enough_memory"


class MissingGpus(MachineError):
    """There are too few GPUs, or containers cannot get them."""

    code = "missing_gpus"


class MissingImage(MachineError):
    """An image is neither on this machine, nor can it be pulled or built."""

    code = "missing_image"


class MissingModel(MachineError):
    """The model's files are neither on this machine, nor can they be downloaded."""

    code = "missing_model"


class MachineUnfit(MachineError):
    """The machine has what is needed, and it does not suffice or fit: a driver, a disk."""

    code = "machine_unfit"


class RedisUnreachable(MachineError):
    """The user's own Redis does not answer, or refuses the log-in."""

    code = "redis_unreachable"


class EngineUnreachable(MachineError):
    """An engine of another host does not answer."""

    code = "engine_unreachable"


class FixFailed(MachineError):
    """A fix of the connector does not take effect with the installed LMCache or vLLM."""

    code = "fix_failed"


class DockerUnavailable(MachineError):
    """No Docker engine of this machine answers, or it has no usable Compose plugin.

    Attributes:
        fix: the command that makes Docker usable; the hint may also name a way without Docker.
    """

    code = "docker_unavailable"

    def __init__(self, message: str, *, hint: str = "", fix: str = "") -> None:
        """Make an error; the hint is by default `fix`."""
        super().__init__(message, hint=hint or fix)
        self.fix = fix or hint


class StackLocked(MachineError):
    """Another command is at work on the stack."""

    code = "stack_locked"


class StackUnhealthy(PdkitError):
    """A service died, was too slow to start, or does not answer."""

    code = "stack_unhealthy"
    exit_code = 4


class OutOfMemory(StackUnhealthy):
    """A service ended because its memory ran out."""

    code = "out_of_memory"


class SwapFailed(StackUnhealthy):
    """The new plan of a swap did not serve; the message says what serves now."""

    code = "swap_failed"


class Interrupted(PdkitError):
    """The user pressed Ctrl-C, or the command was told to end."""

    code = "interrupted"
    exit_code = 130
