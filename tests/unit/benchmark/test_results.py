"""A result survives its file, agrees with its schema, and a broken file is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from deploy.benchmark.results import (
    RequestRecord,
    append_requests,
    read_requests,
    read_result,
    write_result,
)
from deploy.errors import UsageError
from tests.unit.benchmark.samples import result
from tests.unit.benchmark.test_break_even import PATH

SCHEMA = Path(__file__).resolve().parents[3] / "docs/reference/schemas/bench.json"


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = write_result(tmp_path, result())
    assert read_result(tmp_path) == read_result(file) == result()


def test_requests_of_all_repeats_are_kept(tmp_path: Path) -> None:
    one = RequestRecord(
        repeat=0, index=0, arrival_s=0.5, ttft_s=0.1, itl_s=[0.01], e2e_s=0.2, input_tokens=10,
        output_tokens=2,
    )  # fmt: skip
    other = one.model_copy(update={"repeat": 1, "ttft_s": None, "error": "HTTP 500"})
    append_requests(tmp_path, [one])
    append_requests(tmp_path, [other])
    assert list(read_requests(tmp_path)) == [one, other]


def test_requests_of_a_repeat_may_be_missing(tmp_path: Path) -> None:
    assert list(read_requests(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a benchmark result"),
        ("[]", "not a benchmark result"),
        ('{"format": 1}', "not a benchmark result: started: Field required"),
        ('{"format": 2}', "written by a newer pdkit"),
    ],
)
def test_broken_file_is_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_result(tmp_path)


def test_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"result\.json: No such file"):
        read_result(tmp_path)


def test_a_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    file = write_result(tmp_path, result())
    raw = json.loads(file.read_text())
    del raw["up_extra_s"], raw["one_user"], raw["router_throughput"]
    del raw["repeats"][0]["connector"]
    raw["repeats"][0]["usage"]["gpu"] = None
    raw["repeats"][0]["redis_path"] = PATH
    file.write_text(json.dumps(raw))
    read = read_result(tmp_path)
    path = read.repeats[0].redis_path
    assert read.up_extra_s is None
    assert path is not None
    assert (path.store_cpu_s, path.load_cpu_s) == (None, None)
    assert validates(file)


def test_file_agrees_with_the_published_schema(tmp_path: Path) -> None:
    file = write_result(tmp_path, result())
    assert validates(file)
    raw = json.loads(file.read_text())
    del raw["repeats"][0]["hits"]
    file.write_text(json.dumps(raw))
    assert not validates(file)


def validates(file: Path) -> bool:
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    return bool(validator.is_valid(json.loads(file.read_text())))
