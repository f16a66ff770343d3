"""The Docker engine and its Compose plugin: address, version, and `docker info`."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.errors import DockerUnavailable, MachineError
from deploy.runtime.host import text_of

DOCKER = "docker"  # wherever PATH has it
MIN_COMPOSE = (2, 20)
_ASK_TIMEOUT_S = 30
# Where Docker looks for plugins, after the folder of its configuration.
_PLUGIN_FOLDERS = (
    "/usr/local/lib/docker/cli-plugins",
    "/usr/local/libexec/docker/cli-plugins",
    "/usr/lib/docker/cli-plugins",
    "/usr/libexec/docker/cli-plugins",
)
_USUAL_ADDRESS = "unix:///var/run/docker.sock"
_OK = 200  # not http.HTTPStatus, whose import takes a fiftieth of the CPU of `plan`
_HELP = re.compile(r"(See|Run) 'docker .*--help'")
_DENIED = "permission denied; is this user in the group docker?"
_DOWN = "it does not run"
_INSTALL = "curl -fsSL https://get.docker.com | sudo sh"
_OWN_ENGINE = "unset DOCKER_HOST, or docker context use default"
_WITHOUT = "or run the stack as processes: deploy up --runtime process"


def docker_answers(kept: Path) -> bool:
    """Tell whether a Docker engine of this machine answers, with a Compose plugin.

    Asking for the plugin's version takes a third of the CPU of `plan`. So the file `kept` holds for
    which files it was new enough; what starts a stack uses `require_compose`, which always asks.
    """
    try:
        answering_engine()
        files = _files_that_decide()
        if not files or text_of(kept) != files:
            require_compose()
            with suppress(OSError):  # it is asked again then
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(files)
    except MachineError:
        return False
    return True


def _files_that_decide() -> str:
    """Return a line for each file that decides on the plugin's version; "" if others may."""
    folder = _configuration()
    config, command = folder / "config.json", shutil.which(DOCKER)
    plugins = _lines(
        Path(one, "docker-compose") for one in (folder / "cli-plugins", *_PLUGIN_FOLDERS)
    )
    if command is None or not plugins or "cliPluginsExtraDirs" in text_of(config):
        return ""
    return _lines((Path(command), config)) + plugins


def _lines(files: Iterable[Path]) -> str:
    """Return a line for each file that exists; it changes whenever the file is replaced."""
    lines = ""
    for file in files:
        with suppress(OSError):
            found = file.stat()
            lines += f"{file.resolve()} {found.st_ino} {found.st_size} {found.st_mtime_ns}\n"
    return lines


def engine_answers() -> bool:
    """Tell whether a Docker engine of this machine answers."""
    try:
        answering_engine()
    except MachineError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def answering_engine() -> str:
    """Return the address of an engine that answers.

    Raises:
        DockerUnavailable: there is none, it does not answer, or it is another machine's.
    """
    host = _engine_address()
    if not host.startswith("unix://"):
        raise DockerUnavailable(
            f"the Docker engine at {host} is on another machine, so folders of this machine "
            "cannot be mounted",
            hint=f"{_OWN_ENGINE}; {_WITHOUT}",
            fix=_OWN_ENGINE,
        )
    if not Path(host.removeprefix("unix://")).exists():
        raise _no_answer(host, _DOWN)
    from deploy.runtime.http_client import get

    try:
        page = get(host, "/_ping", timeout_s=_ASK_TIMEOUT_S)
    except OSError as exc:
        raise _no_answer(host, reason_of(exc, _ASK_TIMEOUT_S)) from exc
    if page.status != _OK:
        raise _no_answer(host, f"HTTP {page.status}: {page.text[:200]}")
    return host


def _no_answer(host: str, why: str) -> DockerUnavailable:
    return _unusable(f"no Docker engine answers at {host} ({why})", _remedy(host, why))


def _remedy(host: str, why: str) -> str:
    """Return the command that makes the engine at an address answer this user."""
    if why == _DENIED:
        return "sudo usermod -aG docker $USER, then log in again"
    if why != _DOWN:
        return "sudo systemctl restart docker"
    if host.startswith("unix:///run/user/"):  # Docker without root
        return "systemctl --user start docker"
    named = os.environ.get("DOCKER_HOST", "")
    return (
        "unset DOCKER_HOST" if named and named != _USUAL_ADDRESS else "sudo systemctl start docker"
    )


def _unusable(message: str, fix: str) -> DockerUnavailable:
    return DockerUnavailable(message, hint=f"{fix}, {_WITHOUT}", fix=fix)


def docker_info() -> Mapping[str, Any]:
    """Return `docker info`: runtimes, security options, found devices.

    Raises:
        DockerUnavailable: no engine, or no answer: one that hangs still answers a ping.
    """
    host = answering_engine()
    from deploy.runtime.http_client import get

    try:
        page = get(host, "/info", timeout_s=_ASK_TIMEOUT_S)
        if page.status != _OK:
            raise OSError(f"HTTP {page.status}: {page.text}")
        info: Mapping[str, Any] = json.loads(page.text)
    except (OSError, ValueError) as exc:
        why = reason_of(exc, _ASK_TIMEOUT_S)
        raise _unusable(f"docker info failed ({why})", "sudo systemctl restart docker") from exc
    return info


def is_rootless(info: Mapping[str, Any]) -> bool:
    """Tell whether the engine runs without root, so that its containers' root is the user."""
    return any("rootless" in option for option in info.get("SecurityOptions") or ())


def require_compose() -> tuple[int, ...]:
    """Return the Compose plugin's version.

    Raises:
        DockerUnavailable: no engine, no plugin, or one too old to run what is rendered.
    """
    answering_engine()
    done = run_docker(("compose", "version", "--short"), timeout_s=_ASK_TIMEOUT_S, check=False)
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
    wanted = ".".join(map(str, MIN_COMPOSE))
    if done.returncode or match is None:
        raise _unusable(
            f"the Compose plugin is not installed (docker compose {wanted} or newer is needed)",
            "sudo apt-get install docker-compose-plugin",
        )
    version = tuple(int(part) for part in match.groups(default="0"))
    if version < MIN_COMPOSE:
        raise _unusable(
            f"docker compose is {match[0]}, and {wanted} or newer is needed",
            "sudo apt-get install --only-upgrade docker-compose-plugin",
        )
    return version


def run_docker(
    arguments: tuple[str, ...], *, timeout_s: float, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the `docker` command and return what it printed.

    Raises:
        DockerUnavailable: there is no such command.
        MachineError: it failed, or did not end in time; says what it printed.
    """
    try:
        done = subprocess.run(
            (DOCKER, *arguments),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for pdkit alone, which acts between steps
        )
    except OSError as exc:
        raise _unusable("the command docker is not installed", _INSTALL) from exc
    except subprocess.TimeoutExpired as exc:
        raise MachineError(
            f"docker {arguments[0]} did not finish within {timeout_s:g} s",
            hint="look at the engine: docker info",
        ) from exc
    if check and done.returncode:
        raise MachineError(
            f"docker {' '.join(arguments[:2])} failed: {last_line(done.stderr)}",
            hint="docker info",
            details=tuple(done.stderr.splitlines()[-8:]),
        )
    return done


def _engine_address() -> str:
    """Return where the engine listens: by DOCKER_HOST, else by the command's context."""
    if os.environ.get("DOCKER_HOST"):
        return os.environ["DOCKER_HOST"]
    if shutil.which("docker") is None:
        raise _unusable("the command docker is not installed", _INSTALL)
    if not _context_chosen():  # the command starts slowly
        return _USUAL_ADDRESS
    wanted = ("context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
    found = run_docker(wanted, timeout_s=_ASK_TIMEOUT_S, check=False).stdout.strip()
    return found or _USUAL_ADDRESS


def _context_chosen() -> bool:
    """Tell whether the command may have another context than its default."""
    if os.environ.get("DOCKER_CONTEXT"):
        return True
    return "currentContext" in text_of(_configuration() / "config.json")


def _configuration() -> Path:
    """Return the folder of the command's configuration."""
    return Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"))  # noqa: PTH111 - never raises


def last_line(text: str) -> str:
    """Return a program's last line of output, without Docker's hint to its own help."""
    lines = [line for line in text.splitlines() if line.strip() and not _HELP.match(line)]
    return lines[-1].strip() if lines else "no output"


def reason_of(exc: Exception, waited_s: float) -> str:
    """Return in words why an engine did not answer."""
    text = str(exc)
    if "timed out" in text:
        return f"no answer in {waited_s:g} s"
    if "Permission" in text:
        return _DENIED
    if "No such file" in text or "Connection refused" in text:
        return _DOWN
    return text[:200]
