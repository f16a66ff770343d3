"""Open a report in headless Chromium: at a phone's and a desktop's width, light and dark.

Fails where the page writes to the console, asks for anything outside itself, does not draw all
charts, draws one with an axis without labels or a distribution as a vertical line, or is wider than
the window. Leaves the four screenshots for people to look at.

Needs Chromium (Debian: `apt-get install chromium`) and `pip install playwright`; neither is
installed by scripts/install. Usage: python bench/report_page.py REPORT.html FOLDER
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

WIDTHS = (390, 1280)
THEMES = ("light", "dark")
_BARE_AXES = """() => [...document.querySelectorAll('.chart .role-axis[aria-label]')]
    .filter(axis => !axis.querySelector('.role-axis-label text')?.textContent)
    .map(axis => `${axis.closest('.chart').id} has no labels: ${axis.ariaLabel}`)"""
_UPRIGHT = """() => [...document.querySelectorAll('[id$=-distribution] .mark-line path')]
    .filter(line => line.getBBox().width < 1)
    .map(line => `${line.closest('.chart').id} has a vertical line`)"""


def main() -> None:
    report, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        found = [
            f"{width} px, {theme}: {fault}"
            for width, theme in product(WIDTHS, THEMES)
            for fault in faults(browser, report, width, theme, folder)
        ]
        browser.close()
    sys.stdout.write("\n".join(found or ["no fault"]) + f"\nscreenshots: {folder}\n")
    raise SystemExit(bool(found))


def faults(browser: Browser, report: Path, width: int, theme: str, folder: Path) -> Iterator[str]:
    """Yield what is wrong with the page at a width and in a theme."""
    page = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme=theme, offline=True
    )
    said: list[str] = []
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda asked: said.append(f"asks for {asked.url}") if outside(asked) else 0)
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    page.screenshot(path=folder / f"report-{width}-{theme}.png", full_page=True)
    yield from said
    wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    if wider > 0:
        yield f"{wider} px wider than the window"
    missing = page.evaluate("document.querySelectorAll('.chart:not(:has(svg))').length")
    if missing:
        yield f"{missing} charts were not drawn"
    yield from page.evaluate(_BARE_AXES)
    yield from page.evaluate(_UPRIGHT)
    page.close()


def outside(asked: object) -> bool:
    return not str(getattr(asked, "url", "")).startswith(("file:", "data:"))


if __name__ == "__main__":
    main()
