"""Why a container ended or was refused, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.errors import MachineError, MissingGpus, MissingImage, PortTaken


def describe_end(state: Mapping[str, Any]) -> str:
    """Return why a container ended, from the State that Docker tells."""
    code = int(state["ExitCode"])
    if state["OOMKilled"]:
        return f"its memory ran out and the kernel killed it, exit code {code}"
    if code > 128:
        return f"killed by signal {code - 128}"
    return f"exit code {code}" + (f", {state['Error']}" if state.get("Error") else "")


def refusal(said: str, service: str) -> MachineError:
    """Return Docker's refusal to create or start a container as an error with its remedy."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    low = said.lower()
    details = tuple(lines[-4:])
    if "no such image" in low or "image not found" in low or "pull access denied" in low:
        return MissingImage(f"{service}: {last}", hint="deploy images list", details=details)
    if "could not select device driver" in low or "unresolvable cdi" in low:
        return MissingGpus(
            f"{service}: Docker cannot give GPUs to containers here: {last}",
            hint="install the NVIDIA Container Toolkit (then: sudo nvidia-ctk runtime configure "
            "--runtime=docker), or deploy up --runtime process",
            details=details,
        )
    if "unsatisfied condition: cuda" in low:
        return MissingGpus(
            f"{service}: the image is built for a newer CUDA than the driver's: {last}",
            hint="install a newer driver, or --image REF of an image for the driver's CUDA; "
            "nvidia-smi shows both versions",
            details=details,
        )
    if "no such file or directory" in low and ("/dev/kfd" in low or "/dev/dri" in low):
        return MissingGpus(
            f"{service}: the GPU's device node is not on this machine: {last}",
            hint="look at ls /dev/kfd /dev/dri, and that the amdgpu driver is loaded",
            details=details,
        )
    if "port is already allocated" in low or "address already in use" in low:
        return PortTaken(f"{service}: {last}", hint="deploy up --port PORT", details=details)
    return MachineError(f"{service}: Docker refuses it: {last}", hint="docker info",
                        details=details)  # fmt: skip


def of_another(project: str, root: str) -> MachineError:
    """Return the error that a Compose project is not this stack's.

    Args:
        root: the folder of the stack that it is of; "" if it is not of the kit.
    """
    said = f"the Compose project '{project}' on this machine belongs to"
    if root and _does_not_exist(root):
        # Without its folder, no command of the kit can take it down.
        return MachineError(
            f"{said} the stack in {root}, a folder that does not exist",
            hint=f"docker compose -p {project} down -v",
        )
    whose = f"the stack in {root}" if root else "something other than pdkit"
    return MachineError(f"{said} {whose}", hint="deploy up --name ANOTHER")


def _does_not_exist(path: str) -> bool:
    """Tell whether nothing is at a path; of what this user may not read, nobody knows."""
    try:
        Path(path).stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False
