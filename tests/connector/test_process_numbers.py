"""Which numbers a container's processes get, by a stand-in for the kernel that counts them."""

from __future__ import annotations

import os

import pytest
from own_process import run_python
from pdkit_connector import process_numbers
from pdkit_connector.errors import ConnectorError


@pytest.fixture
def kernel(monkeypatch):
    """Hand out numbers from 8 on, as in a container; return those that were used up."""
    used = list(range(1, 8))

    def handed_out():
        used.append(used[-1] + 1 if used[-1] < 32768 else 300)
        return used[-1]

    monkeypatch.setattr(process_numbers, "_next", handed_out)
    return used


def test_the_next_process_gets_a_number_of_its_container(kernel, monkeypatch):
    monkeypatch.setenv("PDKIT_PROCESS_NUMBERS", "4096-6143")
    process_numbers.take_numbers()
    assert 4096 <= kernel[-1] + 1 <= 5119, "and another thousand are left"


def test_another_start_begins_at_another_number(kernel, monkeypatch):
    monkeypatch.setenv("PDKIT_PROCESS_NUMBERS", "4096-6143")
    begins = set()
    for _ in range(4):
        del kernel[7:]
        process_numbers.take_numbers()
        begins.add(kernel[-1])
    assert len(begins) > 1


def test_no_number_is_used_if_none_is_configured(kernel, monkeypatch):
    monkeypatch.delenv("PDKIT_PROCESS_NUMBERS", raising=False)
    process_numbers.take_numbers()
    process_numbers.require_own_number()
    assert len(kernel) == 7


def test_a_kernel_with_too_few_numbers_is_an_error(kernel, monkeypatch):
    monkeypatch.setenv("PDKIT_PROCESS_NUMBERS", "40960-43007")
    with pytest.raises(ConnectorError, match=r"end at 32768 here.*kernel\.pid_max"):
        process_numbers.take_numbers()


def test_a_process_with_a_number_of_another_container_is_refused(monkeypatch):
    monkeypatch.setenv("PDKIT_PROCESS_NUMBERS", f"{os.getpid()}-{os.getpid() + 9}")
    process_numbers.require_own_number()
    monkeypatch.setenv("PDKIT_PROCESS_NUMBERS", f"{os.getpid() + 1}-{os.getpid() + 9}")
    with pytest.raises(ConnectorError, match="cannot share GPU memory"):
        process_numbers.require_own_number()


THEN = """
import os, subprocess, sys
from pdkit_connector.errors import ConnectorError
from pdkit_connector.process_numbers import take_numbers
os.environ["PDKIT_PROCESS_NUMBERS"] = f"{os.getpid() + 100}-{os.getpid() + 4000}"
try:
    take_numbers()
except ConnectorError:
    sys.exit(0)  # this machine's numbers began again meanwhile
argv = (sys.executable, "-c", "import os; print(os.getpid())")
child = int(subprocess.run(argv, capture_output=True).stdout)
sys.exit(child < os.getpid() + 100)
"""


def test_this_kernel_counts_threads_as_processes():
    run_python("-c", THEN)
