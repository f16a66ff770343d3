"""`scripts/docs_site.py`: links out of docs/ lead to copies in the site, and others stay."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.scripts.conftest import ROOT


@pytest.fixture(scope="module")
def site() -> Any:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "uri", "text", "expected"),
    [
        ("docs/README.md", "README.md", "[a](../SECURITY.md#x)", "[a](project/SECURITY.md#x)"),
        ("docs/README.md", "README.md", "[a](tutorial.md)", "[a](tutorial.md)"),
        ("docs/reference/cli.md", "reference/cli.md", "[a](../tutorial.md)", "[a](../tutorial.md)"),
        (
            "docs/reference/images.md", "reference/images.md", "[a](../../images/compat.yaml)",
            "[a](../project/images/compat.yaml)",
        ),
        ("SECURITY.md", "project/SECURITY.md", "[a](docs/tutorial.md)", "[a](../tutorial.md)"),
        ("SECURITY.md", "project/SECURITY.md", "[a](CONTRIBUTING.md)", "[a](CONTRIBUTING.md)"),
        (
            "README.md", "project/README.md", '<img src="docs/images/up-dark.svg">',
            '<img src="../images/up-dark.svg">',
        ),
        ("docs/README.md", "README.md", "[a](../GONE.md)", "[a](../GONE.md)"),
        ("docs/README.md", "README.md", "`[a](../SECURITY.md)`", "`[a](../SECURITY.md)`"),
        (
            "docs/README.md", "README.md", "```\n[a](../SECURITY.md)\n```\n",
            "```\n[a](../SECURITY.md)\n```\n",
        ),
        ("docs/README.md", "README.md", "[a](https://x.example/y)", "[a](https://x.example/y)"),
        ("docs/README.md", "README.md", "[a](#own)", "[a](#own)"),
    ],
)  # fmt: skip
def test_links_are_rewritten_for_the_site(
    site: Any, page: str, uri: str, text: str, expected: str
) -> None:
    file = SimpleNamespace(abs_src_path=str(ROOT / page), src_uri=uri)
    rewritten = site.on_page_markdown(
        text, page=SimpleNamespace(file=file), config=None, files=None
    )
    assert rewritten == expected
