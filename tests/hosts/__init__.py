"""Unit tests on a simulated machine: another processor, fewer cores, no IPv6, another user.

`python -m tests.hosts small` runs them as root in namespaces with bind mounts, so that child
processes see the machine, too. `large` is the other one.
"""
