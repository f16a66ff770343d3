"""What a check found, as JUnit XML for CI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from deploy.errors import ConfigError, PdkitError, printable
from deploy.verify.report import CheckReport

# The test case of a run that did not come to a report.
RUN = "run"


def junit_xml(reports: Sequence[CheckReport], stack: str, ended: PdkitError | None = None) -> str:
    """Return one test suite a run, and in it one test case an item.

    Args:
        ended: what ended the run after these, which has no report; None if nothing did.
    """
    root = ElementTree.Element("testsuites", name="deploy check")
    runs = len(reports) + (ended is not None)
    names = [f"{stack}, run {number}" for number in range(1, runs + 1)] if runs > 1 else [stack]
    for report, name in zip(reports, names, strict=False):
        _add_suite(root, report, name)
    if ended is not None:
        _add_ended(root, ended, names[-1])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode")


def write_junit(path: Path, xml: str) -> None:
    """Write what `junit_xml` returned.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(f"<?xml version='1.0' encoding='utf-8'?>\n{xml}", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(
            f"--junit {path} cannot be written: {exc.strerror}",
            hint="name a file in a folder that you may write to",
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
            message = printable("; ".join(sentences))
            failure = ElementTree.SubElement(case, "failure", message=message)
            failure.text = printable(causes)


def _add_ended(root: ElementTree.Element, ended: PdkitError, name: str) -> None:
    suite = ElementTree.SubElement(
        root, "testsuite", name=name, tests="1", errors="1", failures="0", time="0.00"
    )
    case = ElementTree.SubElement(suite, "testcase", classname="deploy.check", name=RUN)
    error = ElementTree.SubElement(case, "error", message=printable(ended.message), type=ended.code)
    error.text = printable("\n".join((*ended.details, f"try: {ended.hint}")))
