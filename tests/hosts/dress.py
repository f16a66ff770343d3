"""Put a disguise on, inside namespaces of mounts and of the network, and run a program in it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

from tests.compose_plugin import compose_plugin
from tests.hosts.disguises import DISGUISES, Disguise
from tests.hosts.host import CGROUP, CPUINFO, MEMINFO, ONLINE, REPO

USER = 47123  # of no name, and with no files
_PLUGINS = ("/usr/local/lib/docker", "/usr/local/libexec/docker", "/usr/lib/docker",
            "/usr/libexec/docker")  # fmt: skip
_WIDE = re.compile(r"\b(avx512|amx)\w+ ?")
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def main(name: str, scratch: Path, *command: str) -> None:
    """Become the program `command` in a disguise; its own files go below `scratch`."""
    disguise = DISGUISES[name]
    _require_own_namespace()
    # Before anything is mounted below it, and not recursive: a mount would lead out of it.
    if not disguise.host.root:
        os.chown(scratch, USER, USER)
    environ = _environ(disguise, scratch)
    _plug_ins(environ)
    _processor(disguise, scratch)
    _memory(disguise.host.memory_mib, scratch)
    _control_groups(disguise)
    _network(ipv6=disguise.host.ipv6)
    if not disguise.host.source_writable:
        _mount("--bind", REPO, REPO)
        _mount("-o", "remount,bind,ro", REPO)
    if not disguise.host.root:
        _change_user(scratch)
    os.execvpe(command[0], command, {**environ, "DISGUISE": name})  # noqa: S606 - an argv, no shell


def _require_own_namespace() -> None:
    """Refuse to mount anything where the caller, and so the whole machine, would see it."""
    ours, callers = (Path(f"/proc/{pid}/ns/mnt").readlink() for pid in ("self", os.getppid()))
    if ours == callers:
        sys.exit("error: not in a namespace of mounts; run python -m tests.hosts")


def _environ(disguise: Disguise, scratch: Path) -> dict[str, str]:
    """Return the variables, with the locale compiled where it is one."""
    kept = os.environ if disguise.inherits else {"PATH": os.environ["PATH"]}
    environ = {**kept, **disguise.environ, "TMPDIR": str(scratch)}
    if disguise.host.plugins:
        # With CI set, a test that misses Compose fails instead of being skipped.
        environ |= {disguise.host.plugins: str(scratch / "own"), "CI": "true"}
    environ |= {"HOME": str(scratch / "own")} if disguise.host.home else {}
    if (wanted := disguise.host.locale) != "C":
        language, charset = wanted.split(".")
        (scratch / "locales").mkdir()
        compiled = scratch / "locales" / wanted
        subprocess.run(("localedef", "-i", language, "-f", charset, compiled), check=True)
        environ["LOCPATH"] = str(compiled.parent)
    return environ


def _plug_ins(environ: dict[str, str]) -> None:
    """Put Compose where only the user's settings lead to; hide the system's plug-ins."""
    file = compose_plugin()
    if file is None:
        return
    own = Path(environ.get("DOCKER_CONFIG") or Path(environ["HOME"]) / ".docker") / "cli-plugins"
    own.mkdir(parents=True)
    (own / file.name).touch()
    _mount("--bind", file, own / file.name)
    for folder in filter(os.path.isdir, _PLUGINS):
        _mount("-t", "tmpfs", "tmpfs", folder)


def _processor(disguise: Disguise, scratch: Path) -> None:
    host = disguise.host
    first = CPUINFO.read_text().split("\n\n")[0]
    plain = _WIDE.sub("", first)
    more = re.sub(r"^(flags.*)$", lambda m: " ".join((m[1], *disguise.flags)), plain, flags=re.M)
    blocks = [
        re.sub(r"^(processor\s*:) \d+$", rf"\1 {i}", more, flags=re.M) for i in range(host.cores)
    ]
    _show(CPUINFO, "\n\n".join(blocks) + "\n\n", scratch)
    _show(ONLINE, f"0-{host.cores - 1}\n" if host.cores > 1 else "0\n", scratch)
    if host.one_core_usable:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _memory(mib: int, scratch: Path) -> None:
    """Show so much memory, half of it free."""
    text = MEMINFO.read_text()
    for name, shown in (("MemTotal", mib), ("MemFree", mib // 2), ("MemAvailable", mib // 2)):
        text = re.sub(rf"^{name}:.*$", f"{name}: {shown * 1024} kB", text, flags=re.M)
    _show(MEMINFO, text, scratch)


def _control_groups(disguise: Disguise) -> None:
    _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", CGROUP)
    for name, text in disguise.cgroup_files.items():
        (CGROUP / name).parent.mkdir(exist_ok=True)
        (CGROUP / name).write_text(text)


def _network(*, ipv6: bool) -> None:
    """Leave nothing but the loopback device, which is new here and down."""
    settings = Path("/proc/sys/net/ipv6/conf")
    for part in ("all", "default") if settings.exists() else ():
        (settings / part / "disable_ipv6").write_text(str(int(not ipv6)))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _change_user(scratch: Path) -> None:
    # The Python of the tests, and that of the installer, which may be another.
    pythons = (Path(sys.base_prefix), (REPO / ".uv" / "bin" / "python").resolve().parents[1])
    _let_reach({REPO, *(python.resolve() for python in pythons)}, scratch)
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)


def _let_reach(paths: set[Path], scratch: Path) -> None:
    """Let others come to these paths: of a closed folder above, show nothing but the way there."""
    closed = {path: folder for path in paths if (folder := _closed_above(path))}
    asides = {path: scratch / f"aside-{i}" for i, path in enumerate(sorted(closed))}
    for path, aside in asides.items():
        aside.mkdir()
        _mount("--bind", path, aside)
    for folder in set(closed.values()):
        _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", folder)
    for path, aside in asides.items():
        path.mkdir(parents=True, exist_ok=True)
        _mount("--move", aside, path)


def _closed_above(path: Path) -> Path | None:
    folders = reversed(path.parents)
    return next((folder for folder in folders if not folder.stat().st_mode & 0o001), None)


def _show(file: Path, text: str, scratch: Path) -> None:
    instead = scratch / file.name
    instead.write_text(text)
    instead.chmod(0o444)
    _mount("--bind", instead, file)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(("mount", *arguments), check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
