"""The runtime table: what differs between the ways to run services, one row each.

What services are run with, programs or images, is in `deploy/workflows/software.py`; how they are
started, in the launchers of `deploy/runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Runtime:
    """One row.

    Attributes:
        own_network: services have a network of their own, in which the machine's loopback addresses
            mean the service itself, and ports need not be unique.
        own_images: versions of vLLM and LMCache come with an image.
        as_user: services run as the user, with the variables, limits and files of the user's shell.
        limits_memory: a service that exceeds `engine.memory_gib` is killed.
        several_hosts: a stack can have engines on other hosts.
        survives_reboot: services come back after a reboot by themselves.
    """

    own_network: bool
    own_images: bool
    as_user: bool
    limits_memory: bool
    several_hosts: bool
    survives_reboot: bool


RUNTIMES = {
    "process": Runtime(
        own_network=False,
        own_images=False,
        as_user=True,
        limits_memory=False,
        several_hosts=True,
        survives_reboot=False,
    ),
    "compose": Runtime(
        own_network=True,
        own_images=True,
        as_user=False,
        limits_memory=True,
        several_hosts=False,
        survives_reboot=True,
    ),
}
