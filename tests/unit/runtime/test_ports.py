"""Whether ports are free, with real sockets."""

from __future__ import annotations

import re
import socket

import pytest

from deploy.errors import MachineError, PortTaken
from deploy.runtime.ports import require_free
from tests.ports import free_row, taken

HOST = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - for a moment, with nobody behind it


def stack_ports(base: int) -> dict[int, str]:
    return {base: "router", base + 1: "redis", base + 10: "producer-0"}


@pytest.fixture
def base() -> int:
    """A port with room for a stack above it, all free."""
    return free_row()


def test_free_ports_are_accepted(base: int) -> None:
    require_free(stack_ports(base), base=base, host=HOST)


@pytest.mark.parametrize(("offset", "owner"), [(0, "router"), (1, "redis"), (10, "producer-0")])
def test_a_taken_port_names_its_owner(base: int, offset: int, owner: str) -> None:
    with taken(base + offset), pytest.raises(PortTaken) as caught:
        require_free(stack_ports(base), base=base, host=HOST)
    assert f"port {base + offset} (for {owner})" in caught.value.message
    assert caught.value.exit_code == 3


def test_the_port_of_the_hint_is_free_for_the_whole_stack(base: int) -> None:
    with taken(base), taken(base + 101):
        with pytest.raises(PortTaken) as caught:
            require_free(stack_ports(base), base=base, host=HOST)
        hinted = re.match(r"deploy plan --port (\d+), or ss -ltnp ", caught.value.hint)
        assert hinted is not None
        port = int(hinted[1])
        assert port not in (base, base + 100), "its redis would have met the other listener"
        require_free(stack_ports(port), base=base, host=HOST)
        for each in stack_ports(port):
            with taken(each):
                pass


def test_a_listener_on_all_addresses_counts(base: int) -> None:
    with taken(base, EVERYWHERE), pytest.raises(PortTaken):
        require_free({base: "router"}, base=base, host=HOST)


def test_a_router_on_all_addresses_meets_a_listener_on_one(base: int) -> None:
    with taken(base), pytest.raises(PortTaken):
        require_free({base: "router"}, base=base, host=EVERYWHERE)


def test_a_port_that_was_just_closed_is_free(base: int) -> None:
    with taken(base), socket.create_connection((HOST, base)) as client:
        client.sendall(b"x")
    require_free({base: "router"}, base=base, host=HOST)


def test_looking_does_not_take_them(base: int) -> None:
    require_free(stack_ports(base), base=base, host=HOST)
    with taken(base):
        pass


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_an_address_that_is_not_this_machines_is_not_called_a_taken_port(
    base: int, host: str
) -> None:
    with pytest.raises(MachineError) as caught:
        require_free({base: "router"}, base=base, host=host)
    assert host in caught.value.message
    assert "taken" not in caught.value.message


def test_near_the_last_port_there_may_be_nothing_to_hint_at(base: int) -> None:
    with taken(base), pytest.raises(PortTaken) as caught:
        require_free({base: "router", 65535: "producer-0"}, base=base, host=HOST)
    assert caught.value.retry == ({"--port": "PORT"},)


def test_the_hint_leads_to_room_for_the_whole_stack_also_in_a_repair(base: int) -> None:
    """Only an engine is missing: its port is not the one that `--port` names."""
    with taken(base + 10), pytest.raises(PortTaken) as caught:
        require_free({base + 10: "producer-0"}, base=base, host=HOST)
    assert f"port {base + 10} (for producer-0)" in caught.value.message
    ((_, hinted),) = caught.value.retry[0].items()
    assert (int(hinted) - base) % 100 == 0
