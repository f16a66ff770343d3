"""Unit tests on a machine in disguise: another processor, fewer cores, no IPv6, another user.

`python -m tests.hosts` runs them once in each disguise, all at the same time, as root. A disguise
is made of namespaces and bind mounts, so child processes see it too.
"""
