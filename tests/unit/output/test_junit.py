"""A check's findings as CI reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deploy.errors import ConfigError, StackUnhealthy
from deploy.output.junit import junit_xml, write_junit
from deploy.verify.items import Failure
from deploy.verify.report import CheckReport, Diagnosis
from tests.unit.output.test_views import PASSED

LOST = Diagnosis("keys_lost", "Redis was flushed", "deploy check --name demo")
FAILED = replace(PASSED, failed=(Failure("redis", "2 chunks & more"),), diagnosis=(LOST,))


def read(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_bytes())  # noqa: S314 - our own


def test_each_item_is_a_test_case(tmp_path: Path) -> None:
    write_junit(tmp_path / "found.xml", junit_xml([PASSED], "demo"))
    (suite,) = read(tmp_path / "found.xml")
    assert suite.attrib == {
        "name": "demo", "tests": "5", "errors": "0", "failures": "0", "time": "2.50",
    }  # fmt: skip
    assert [case.attrib["name"] for case in suite] == [
        "producer-0 → consumer-0", "router, no gap", "equivalence", "redis", "engines",
    ]  # fmt: skip
    assert not list(suite.iter("failure"))


def test_a_failure_says_why_and_what_to_type(tmp_path: Path) -> None:
    write_junit(tmp_path / "found.xml", junit_xml([PASSED, FAILED], "demo"))
    good, bad = read(tmp_path / "found.xml")
    assert (good.attrib["name"], bad.attrib["name"]) == ("demo, run 1", "demo, run 2")
    assert (good.attrib["failures"], bad.attrib["failures"]) == ("0", "1")
    (failure,) = bad.iter("failure")
    assert failure.attrib["message"] == "2 chunks & more"
    assert "keys_lost" in str(failure.text) and "deploy check --name demo" in str(failure.text)


@pytest.mark.parametrize("sign", ["\x1b", "\x00", "\x0c", "\x9b", "\ud800", "\ufffe"])
def test_characters_forbidden_in_xml_are_removed(tmp_path: Path, sign: str) -> None:
    said = f"HTTP 500: {sign}[31mno\tmore{sign} Größe 🐙"
    cause = replace(LOST, message=said)
    found = replace(PASSED, failed=(Failure("redis", said),), diagnosis=(cause,))
    ended = StackUnhealthy(said, details=(said,))
    write_junit(tmp_path / "found.xml", junit_xml([found], "demo", ended))
    told = read(tmp_path / "found.xml")
    (failure,), (error,) = told.iter("failure"), told.iter("error")
    for one in (failure, error):
        assert one.attrib["message"] == "HTTP 500: [31mno\tmore Größe 🐙"
        assert "HTTP 500: [31mno\tmore Größe 🐙" in str(one.text)


@pytest.mark.parametrize(
    ("done", "names"), [([], ["demo"]), ([PASSED, FAILED], ["demo, run 1", "demo, run 2"])]
)
def test_a_run_that_could_not_be_ended_is_an_error_beside_those_before(
    tmp_path: Path, done: list[CheckReport], names: list[str]
) -> None:
    ended = StackUnhealthy("not answering: router", hint="deploy logs router", details=("a line",))
    write_junit(tmp_path / "found.xml", junit_xml(done, "demo", ended))
    *before, last = read(tmp_path / "found.xml")
    names = [*names, "demo, run 3"] if done else names
    assert [suite.attrib["name"] for suite in (*before, last)] == names
    assert [suite.attrib["errors"] for suite in (*before, last)] == [*("0" for _ in done), "1"]
    assert (last.attrib["tests"], last.attrib["failures"]) == ("1", "0")
    (error,) = last.iter("error")
    assert error.attrib == {"message": "not answering: router", "type": "stack_unhealthy"}
    assert str(error.text).split("\n") == ["a line", "try: deploy logs router"]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--junit"):
        write_junit(tmp_path / "no folder" / "found.xml", "<testsuites/>")
