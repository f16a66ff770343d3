"""Plays the pods of an exported stack with podman, in the place of a cluster.

podman plays pods. What else a cluster does with an export is done here: it makes pods of workloads,
gives them the names of Services, and writes files for the volumes that podman does not know. All of
it was read from podman 4.3, which Debian 12 has.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.docker.conftest import docker

Object = dict[str, Any]
WORKLOADS = ("StatefulSet", "Deployment", "Job")
# Its names are kept by that name, machine-wide: another run, or a user, has others.
NETWORK = f"pdkit-{os.getpid()}"
# The limit only ends what hangs.
_LIMIT_S = 600
# podman asks for more files and processes than root may have in some machines; and there may be no
# systemd.
_CONF = """\
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
"""

# Each field of an exported pod is below one of these, whatever its place in a list.
PLAYED = (
    "containers.args", "containers.command", "containers.env", "containers.image",
    "containers.name", "containers.resources.limits", "containers.resources.requests.memory",
    "containers.securityContext", "containers.volumeMounts", "initContainers",
    "securityContext.runAsGroup", "securityContext.runAsUser", "volumes.configMap", "volumes.name",
)  # fmt: skip
CHANGED = {
    "containers.livenessProbe": "left out: podman would ask with curl, at a port without a name",
    "containers.ports": "left out: podman would open them on the host, the same for each engine",
    "restartPolicy": "OnFailure instead of Always, which podman applies to init containers, too",
    "securityContext.fsGroup": "the group of the files of projected and secret volumes",
    "volumes.emptyDir": "named after its pod: podman shares those of one name; on disk, any size",
    "volumes.projected": "a folder of the host: podman has no such volumes",
    "volumes.secret": "a folder of the host: podman mounts all keys, whatever items say",
}
IGNORED = {
    "affinity": "one node",
    "automountServiceAccountToken": "no such token",
    "containers.lifecycle": "nothing runs before a container is stopped",
    "containers.readinessProbe": "asked here instead, as startup and liveness probes are",
    "containers.resources.requests.cpu": "one node",
    "containers.startupProbe": "as readiness probes",
    "containers.terminationMessagePolicy": "podman keeps no message of a container's end",
    "enableServiceLinks": "no such variables",
    "nodeSelector": "one node",
    "securityContext.fsGroupChangePolicy": "podman changes no group",
    "securityContext.runAsNonRoot": "the user is named beside it",
    "securityContext.seccompProfile": "podman's own filter is the default",
    "terminationGracePeriodSeconds": "podman stops pods as its command says",
    "topologySpreadConstraints": "one node",
}
IGNORED_KINDS = {
    "Namespace": "podman has none",
    "NetworkPolicy": "every pod reaches every other",
    "PodDisruptionBudget": "nothing is evicted",
    "Service": "pods get its name in the DNS of podman's network, without an address of its own",
}


def fields(value: object, at: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each field of an object."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from fields(one, f"{at}.{name}".removeprefix("."))
    elif isinstance(value, list) and value:
        for one in value:
            yield from fields(one, at)
    else:
        yield at, value


def place(path: str, table: Iterable[str]) -> str | None:
    """Return the row of a table that a field is below."""
    return next((row for row in table if f"{path}.".startswith(f"{row}.")), None)


@dataclass(frozen=True)
class Pod:
    """A pod that a controller would make of a workload.

    Attributes:
        names: by which other pods find it.
        spec: as exported.
    """

    name: str
    names: tuple[str, ...]
    labels: Mapping[str, str]
    spec: Object

    @property
    def main(self) -> Object:
        """Return the one container that lasts."""
        (found,) = self.spec["containers"]
        return dict(found)

    @property
    def container(self) -> str:
        """Return podman's name of that container."""
        return f"{self.name}-{self.main['name']}"


def pods(objects: Sequence[Object]) -> dict[str, Pod]:
    """Return the pods of an export by their names."""
    services = [one for one in objects if one["kind"] == "Service"]
    workloads = [one for one in objects if one["kind"] in WORKLOADS]
    return {pod.name: pod for one in workloads for pod in _pods_of(one, services)}


def _pods_of(workload: Object, services: Sequence[Object]) -> Iterator[Pod]:
    spec, template = workload["spec"], workload["spec"]["template"]
    labels = template["metadata"]["labels"]
    found_by = [
        one["metadata"]["name"]
        for one in services
        if one["spec"]["selector"].items() <= labels.items()
    ]
    for number in range(spec.get("replicas", 1)):
        name = f"{workload['metadata']['name']}-{number}"
        # A pod of a StatefulSet has a name below that of its Service.
        own = [f"{name}.{spec['serviceName']}"] if "serviceName" in spec else []
        yield Pod(name, (*found_by, *own), labels, template["spec"])


@dataclass(frozen=True)
class Node:
    """One machine of a cluster, with one namespace: podman, with a store of its own.

    Attributes:
        folder: of the store, and of the files that pods mount.
        maps: ConfigMap → key → text.
        secret: key → text.
    """

    folder: Path
    maps: Mapping[str, Mapping[str, str]]
    secret: Mapping[str, str]

    def podman(
        self, *arguments: str, text: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run podman on this node's store."""
        places = {"root": "root", "runroot": "run", "tmpdir": "tmp", "network-config-dir": "net"}
        own = (f"--{option}={self.folder / name}" for option, name in places.items())
        done = subprocess.run(
            ("podman", *own, *arguments),
            env={**os.environ, "CONTAINERS_CONF": str(self.folder / "containers.conf")},
            input=text,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0 or not check, f"podman {' '.join(arguments)}\n{done.stderr}"
        return done

    def prepare(self, images: Iterable[str]) -> None:
        """Make the store, with images that Docker has, and the network."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = int(Path("/proc/sys/kernel/pid_max").read_text())
        processes = min(most, resource.getrlimit(resource.RLIMIT_NPROC)[1])
        conf = _CONF.format(files=files, processes=processes)
        (self.folder / "containers.conf").write_text(conf)
        for image in images:
            (shown,) = json.loads(docker("image", "inspect", image))
            driver = shown.get("GraphDriver") or {}
            if driver.get("Name") == "overlay2":
                self._borrow(image, shown["Config"], driver["Data"])
            else:
                self._copy(image)
        self.podman("network", "create", NETWORK)

    def _borrow(self, image: str, config: Object, layers: Mapping[str, str]) -> None:
        """Mount the files of Docker's image, read-only, as those of one: a copy takes minutes."""
        archive = self.folder / "image.tar"
        with tarfile.open(archive, "w") as one_layer:
            mark = tarfile.TarInfo(image.replace("/", "-"))  # else all have the same layer
            one_layer.addfile(mark, io.BytesIO())
        changes = [f"USER {config['User']}", f"WORKDIR {config['WorkingDir']}"]
        changes += [f"ENV {one}" for one in config["Env"]]
        self.podman("import", *(f"--change={one}" for one in changes), str(archive), image)
        layer = hashlib.sha256(archive.read_bytes()).hexdigest()
        files = ":".join(filter(None, (layers["UpperDir"], layers.get("LowerDir"))))
        place = self.folder / layer  # podman hides what is mounted below its own folder
        place.mkdir()
        mount = ("mount", "-t", "overlay", "overlay", "-o", f"ro,lowerdir={files}", str(place))
        subprocess.run(mount, check=True)
        podmans = self.folder / "root" / "overlay" / layer / "diff"
        shutil.rmtree(podmans)
        podmans.symlink_to(place)

    def _copy(self, image: str) -> None:
        archive = self.folder / "image.tar"
        docker("save", "--output", str(archive), image)
        self.podman("load", "--quiet", f"--input={archive}")
        archive.unlink()

    def play(self, pod: Pod) -> None:
        """Start a pod."""
        options = ",".join(f"alias={name}" for name in pod.names)
        network = f"--network={NETWORK}:{options}".removesuffix(":")
        text = yaml.safe_dump_all([*self._config_maps(pod), self._played(pod)])
        self.podman("kube", "play", network, "-", text=text)

    def remove(self, pod: Pod) -> None:
        """Kill a pod and remove it."""
        self.podman("pod", "rm", "--force", "--time=0", pod.name)

    def clear(self) -> None:
        """Remove what a node has beside its files."""
        self.podman("pod", "rm", "--all", "--force", "--time=0", check=False)
        self.podman("network", "rm", "--force", NETWORK, check=False)
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in reversed(mounted):
            if Path(place).is_relative_to(self.folder):
                subprocess.run(("umount", place), check=True)

    def finished(self, pod: Pod) -> subprocess.CompletedProcess[str]:
        """Play a pod until it ends; return its exit code and what it printed, and remove it."""
        try:
            self.play(pod)
            code = int(self.podman("wait", pod.container).stdout)
            logs = self.podman("logs", pod.container)
        finally:
            self.remove(pod)  # also when a test's time ends: the next one plays the same
        return subprocess.CompletedProcess(pod.name, code, logs.stdout, logs.stderr)

    def pid(self, pod: Pod) -> int:
        """Return the process of a pod's main container, as this machine numbers it."""
        return int(self.podman("inspect", "--format={{.State.Pid}}", pod.container).stdout)

    def is_ready(self, pod: Pod) -> bool:
        """Ask a pod as its three probes do."""
        probes = ("startupProbe", "readinessProbe", "livenessProbe")
        return all(self._answers(pod, pod.main[probe]) for probe in probes)

    def _answers(self, pod: Pod, probe: Object) -> bool:
        if "exec" in probe:
            command = ("exec", pod.container, *probe["exec"]["command"])
            return self.podman(*command, check=False).returncode == 0
        get = probe["httpGet"]
        (port,) = (one["containerPort"] for one in pod.main["ports"] if one["name"] == get["port"])
        try:
            url = f"http://{self._address(pod)}:{port}{get['path']}"
            return httpx.get(url, timeout=probe["timeoutSeconds"], trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def _address(self, pod: Pod) -> str:
        infra = self.podman("pod", "inspect", "--format={{.InfraContainerID}}", pod.name).stdout
        where = f'{{{{(index .NetworkSettings.Networks "{NETWORK}").IPAddress}}}}'
        return self.podman("inspect", f"--format={where}", infra.strip()).stdout.strip()

    def _config_maps(self, pod: Pod) -> Iterator[Object]:
        names = (one["configMap"]["name"] for one in pod.spec["volumes"] if "configMap" in one)
        for name in names:
            head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
            yield {**head, "data": dict(self.maps[name])}

    def _played(self, pod: Pod) -> Object:
        """Return a pod as podman takes it: with what is `CHANGED`."""
        spec = pod.spec
        own = {
            one["name"]: f"{pod.name}-{one['name']}" for one in spec["volumes"] if "emptyDir" in one
        }
        changed = {
            "restartPolicy": spec.get("restartPolicy", "OnFailure"),
            "volumes": [self._volume(one, pod, own) for one in spec["volumes"]],
            **{
                kind: [_container(one, own) for one in spec.get(kind, ())]
                for kind in ("initContainers", "containers")
            },
        }
        metadata = {"name": pod.name, "labels": dict(pod.labels)}
        return {
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**spec, **changed},
        }  # fmt: skip

    def _volume(self, volume: Object, pod: Pod, own: Mapping[str, str]) -> Object:
        name = volume["name"]
        if "emptyDir" in volume:
            return {"name": own[name], "emptyDir": {}}
        if "configMap" in volume:
            return volume
        folder = self.folder / "volumes-of-pods" / pod.name / name
        shown = volume.get("projected") or {**volume["secret"], "sources": [volume]}
        for path, text in self._contents(shown["sources"]):
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            os.chown(file, 0, pod.spec["securityContext"]["fsGroup"])
            file.chmod(shown.get("defaultMode", 0o644))
        return {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}

    def _contents(self, sources: Sequence[Object]) -> Iterator[tuple[str, str]]:
        """Yield the path and the text of each file that a volume has."""
        for source in sources:
            one = source.get("secret") or source["configMap"]
            known = self.secret if "secret" in source else self.maps[one["name"]]
            for item in one["items"]:
                if item["key"] in known or not one.get("optional"):
                    yield item["path"], known[item["key"]]


def _container(container: Object, own: Mapping[str, str]) -> Object:
    kept = {key: one for key, one in container.items() if f"containers.{key}" not in CHANGED}
    mounts = [
        {**one, "name": own.get(one["name"], one["name"])} for one in container["volumeMounts"]
    ]
    return {**kept, "volumeMounts": mounts}
