"""What is judged of the Redis path's measurements."""

from __future__ import annotations

from bench.redis_path.contender import MIB
from bench.redis_path.report import rows, targets
from bench.redis_path.rounds import Sample


def samples(*seconds: float) -> list[Sample]:
    return [Sample(one, cpu_s=0.1, server_cpu_s=0.1) for one in seconds]


def judged(second: list[Sample]) -> dict[str, tuple[str, bool]]:
    measured = {
        "retrieve": {
            "rawunix": samples(1.0, 2.0, 9.0),
            "ours": samples(0.5, 1.0, 9.0),
            "second": second,
            "copy": samples(0.1, 0.1, 0.1),
            "first": samples(0.1, 0.25, 0.25),
        }
    }
    return {one.what: (one.measured, one.met) for one in targets(rows(measured, 1, 4 * MIB))}


def test_each_of_ours_is_judged_by_the_median_of_the_rounds_ratios() -> None:
    found = judged(samples(1.0, 2.5, 9.0))
    assert found["retrieve by raw GET, Unix, 4 MiB"] == ("2.00", True)
    assert found["second tier's retrieve by raw GET, Unix, 4 MiB"] == ("1.00", True)
    assert found["first tier's retrieve by a copy in memory, 4 MiB"] == ("0.40", False)
    assert "retrieve by raw GET, TCP, 4 MiB" not in found, "it took no part"


def test_a_second_tier_that_is_slower_than_a_socket_fails() -> None:
    found = judged(samples(2.0, 4.0, 9.0))
    assert found["second tier's retrieve by raw GET, Unix, 4 MiB"] == ("0.50", False)
