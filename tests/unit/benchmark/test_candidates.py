"""Which topologies a sweep compares."""

from __future__ import annotations

import pytest

from deploy.benchmark.candidates import feasible, named
from deploy.errors import UsageError


def names(units: int, *, has_gpus: bool = True) -> list[str]:
    return [one.name for one in feasible(units, has_gpus=has_gpus)]


def test_every_split_and_both_baselines_of_every_tensor_parallel_size() -> None:
    assert names(4) == [
        "4a", "4a+redis", "1p3d", "2p2d", "3p1d",
        "2a:tp2", "2a+redis:tp2", "1p1d:tp2",
        "1a:tp4",
    ]  # fmt: skip


def test_engines_on_processors_have_one_rank() -> None:
    assert names(3, has_gpus=False) == ["3a", "3a+redis", "1p2d", "2p1d"]


@pytest.mark.parametrize("units", range(1, 17))
def test_each_candidate_uses_all_gpus_and_is_listed_once(units: int) -> None:
    found = feasible(units, has_gpus=True)
    assert {one.units for one in found} == {units}
    assert len({one.name for one in found}) == len(found)
    assert named(",".join(one.name for one in found)) == found


def test_a_list_takes_the_stacks_own_size_where_it_names_none() -> None:
    assert [one.tp for one in named("1p1d, 2a:tp4", tp=2)] == [2, 4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1p1d,2x", "'2x' is not a topology"),
        ("", "'' is not a topology"),
        ("1a+redis", "'1a\\+redis' is not a topology"),
        ("2a:tp0", "'2a:tp0' is not a topology"),
        ("2a,1p1d,2a", "2a is named twice"),
    ],
)
def test_invalid_topology_lists_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"^--topologies: {words}"):
        named(text)
