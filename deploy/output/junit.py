"""What a check found, as JUnit XML for CI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from deploy.errors import ConfigError
from deploy.verify.report import CheckReport


def write_junit(path: Path, reports: Sequence[CheckReport], stack: str) -> None:
    """Write one test suite a run, and in it one test case an item.

    Raises:
        ConfigError: the file cannot be written.
    """
    root = ElementTree.Element("testsuites", name="deploy check")
    for number, report in enumerate(reports, 1):
        _add_suite(root, report, f"{stack}, run {number}" if len(reports) > 1 else stack)
    tree = ElementTree.ElementTree(root)
    ElementTree.indent(tree)
    try:
        tree.write(path, encoding="utf-8", xml_declaration=True)
    except OSError as exc:
        raise ConfigError(
            f"--junit {path} cannot be written: {exc.strerror}",
            hint="name a file in a folder of yours",
        ) from exc


def _add_suite(root: ElementTree.Element, report: CheckReport, name: str) -> None:
    items = report.items
    suite = ElementTree.SubElement(
        root, "testsuite", name=name, tests=str(len(items)), errors="0",
        failures=str(sum(bool(sentences) for sentences in items.values())),
        time=f"{report.seconds:.2f}",
    )  # fmt: skip
    causes = "\n".join(f"{c.message} [{c.code}]; try: {c.hint}" for c in report.diagnosis)
    for item, sentences in items.items():
        case = ElementTree.SubElement(suite, "testcase", classname="deploy.check", name=item)
        if sentences:
            failure = ElementTree.SubElement(case, "failure", message="; ".join(sentences))
            failure.text = causes
