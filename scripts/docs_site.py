"""Hooks of mkdocs: pages may link to files of the checkout that are not in docs/.

What they link to, such as CONTRIBUTING.md, becomes part of the site below `project/`. Links are
written for the checkout, where GitHub and editors follow them, and are rewritten here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_PROJECT = "project"
_ORDER = ("README.md", "tutorial.md", "how-to", "reference", "explanation", "results")
# A target of a Markdown link or of an HTML attribute: no URL and no anchor alone.
_LINK = re.compile(r"""(\]\(|\b(?:src|srcset|href)=")(?![a-z][a-z0-9+.-]*:|#)([^()\s"#]+)""")
_CODE = re.compile(r"^(```+)[^\n]*\n.*?^\1\s*$|`[^`\n]+`", re.M | re.S)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    waiting = sorted(DOCS.rglob("*.md"))
    added: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in added or target.is_relative_to(DOCS) or not target.is_file():
                continue
            added.add(target)
            files.append(File.generated(config, _uri(target), abs_src_path=str(target)))
            waiting += [target] if target.suffix == ".md" else []
    return files


def on_nav(nav: Any, *, config: Any, files: Any) -> Any:  # noqa: ARG001 - mkdocs's signature
    """Show the sections in the order in which they are read."""

    def rank(item: Any) -> int:
        page = item
        while getattr(page, "children", None):
            page = page.children[0]
        first = page.file.src_uri.split("/")[0]
        return _ORDER.index(first) if first in _ORDER else len(_ORDER)

    nav.items.sort(key=rank)
    return nav


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Rewrite the links of a page to where their targets are in the site."""
    source = Path(page.file.abs_src_path)
    here = os.path.dirname(page.file.src_uri)  # noqa: PTH120 - a URI, not a path

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.is_file():
            return match[0]  # mkdocs reports it
        return match[1] + os.path.relpath(_uri(target), here or ".")

    return _outside_code(markdown, lambda text: _LINK.sub(moved, text))


def _targets(page: Path) -> list[Path]:
    prose = _CODE.sub("", page.read_text(encoding="utf-8"))
    return [(page.parent / match[2]).resolve() for match in _LINK.finditer(prose)]


def _outside_code(text: str, change: Any) -> str:
    parts, at = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join((*parts, change(text[at:])))


def _uri(file: Path) -> str:
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return f"{_PROJECT}/{file.relative_to(ROOT).as_posix()}"
