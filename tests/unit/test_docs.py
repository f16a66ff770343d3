"""The documentation: links lead somewhere, every page is in the index, and commands can be typed.

What is written in fenced blocks is held against the commands themselves, so that an option that
goes away is not promised any more.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from deploy.cli.commands import whole_app

REPO = Path(__file__).resolve().parents[2]
INDEX = REPO / "docs" / "README.md"
PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])

_FENCE = re.compile(r"^(?P<fence>```+)[^\n]*\n(?P<body>.*?)^(?P=fence)\s*$", re.M | re.S)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_PICTURE = re.compile(r"\b(?:src|srcset)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)
_NAMED_ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")
# What stands before a command: in CI files, as a variable of the shell, or as a word of its syntax.
_OF_YAML = re.compile(r"^\s*(?:- +)?(?:run: +)?")
_BEFORE_COMMANDS = re.compile(r"[A-Za-z_]\w*=.*|sudo|time|if|then|do|else|!")
_SUBSTITUTED = re.compile(r"\$\(([^()]*)\)")
_FOR_ALL_COMMANDS = ("--help", "--version")


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO))


# Words.

# What the glossary or the house style says instead.
REPLACED = {
    "allow-unproven": "allow-untested", "box": "machine", "boxes": "machines", "mend": "fix",
    "proven": "tested", "unproven": "untested", "whence": "from where",
}  # fmt: skip


def replaced_words(text: str) -> list[str]:
    """Return the words of a page that others replace."""
    return [word for word in re.findall(r"[a-z]+(?:-[a-z]+)*", text.lower()) if word in REPLACED]


@pytest.mark.parametrize("page", [one for one in PAGES if one.name != "CHANGELOG.md"], ids=name_of)
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    assert replaced_words(page.read_text(encoding="utf-8")) == []


def test_a_replaced_word_is_found() -> None:
    assert replaced_words("A Box; `--allow-unproven`, unproven-ish boxes") == [
        "box", "allow-unproven", "boxes",
    ]  # fmt: skip


# Links.


def anchors(text: str) -> set[str]:
    """Return what may stand behind the `#` of a link to this page, as GitHub makes it."""
    prose = _FENCE.sub("", text)
    slugs: Counter[str] = Counter()
    found = set(_NAMED_ANCHOR.findall(prose))
    for heading in _HEADING.findall(prose):
        shown = re.sub(r"<[^>]+>", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")
        found.add(f"{slug}-{slugs[slug]}" if slugs[slug] else slug)
        slugs[slug] += 1
    return found


def links(text: str) -> list[str]:
    """Return the targets of a page's links to files and anchors, outside of code."""
    prose = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))
    found = [*_LINK.findall(prose), *_PICTURE.findall(prose)]
    return [target for target in found if not _ELSEWHERE.match(target)]


def broken_links(page: Path) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading of it."""
    broken = []
    for link in links(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not file.exists() or (
            anchor
            and (file.suffix != ".md" or anchor not in anchors(file.read_text(encoding="utf-8")))
        ):
            broken.append(link)
    return broken


def not_in(index: Path, pages: Sequence[Path]) -> list[Path]:
    """Return the pages that the index does not link to; itself need not be in it."""
    targets = (link.partition("#")[0] for link in links(index.read_text(encoding="utf-8")))
    linked = {(index.parent / target).resolve() for target in targets if target}
    return [page for page in pages if page.resolve() not in {*linked, index.resolve()}]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_a_target(page: Path) -> None:
    assert broken_links(page) == []


def test_every_page_is_in_the_index() -> None:
    assert not_in(INDEX, [page for page in PAGES if INDEX.parent in page.parents]) == []


def missing_pages(text: str) -> list[str]:
    """Return the pages in docs/ that code names, as in an error's hint, and that are not there."""
    return [page for page in re.findall(r"docs/[\w/-]+\.md", text) if not (REPO / page).exists()]


def test_pages_that_code_names_are_there() -> None:
    files = (file for at in ("deploy", "scripts", "images") for file in (REPO / at).rglob("*"))
    sources = (file for file in files if file.suffix in {"", ".py", ".yaml"} and file.is_file())
    texts = [file.read_text("utf-8") for file in sources]
    assert [page for text in texts for page in missing_pages(text)] == []


def test_a_page_that_code_names_must_exist() -> None:
    assert missing_pages("see docs/gone.md, docs/README.md") == ["docs/gone.md"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](there.md) [b](there.md#a-heading) [c](#own) [d](https://x.example/y#z)\n# Own", []),
        ("[a](gone.md)", ["gone.md"]),
        ("[a](there.md#gone)", ["there.md#gone"]),
        ("[a](#gone)\n# Own", ["#gone"]),
        ("[a](#inside)\n```\n# Inside\n```", ["#inside"]),
        ("[`code`](gone.md)", ["gone.md"]),
        ("`[a](gone.md)`\n```\n[b](gone.md)\n```", []),
        ("[a](picture.png#gone)", ["picture.png#gone"]),
        ('<source srcset="gone.svg"><img src="picture.png">', ["gone.svg"]),
    ],
)
def test_a_broken_link_is_reported(text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `heading`")
    (tmp_path / "picture.png").touch()
    page = tmp_path / "page.md"
    page.write_text(text)
    assert broken_links(page) == expected


def test_anchors_are_those_of_github() -> None:
    text = "# What a hit is, and why 85 % can\n## Twice\n## Twice\n## <a id='b1'></a>B1: it's\n"
    found = {"what-a-hit-is-and-why-85--can", "twice", "twice-1", "b1-its"}
    assert anchors(text) == found
    assert anchors('## <a id="b1"></a>B1') == {"b1"}


def test_a_page_that_is_missing_in_the_index_is_reported(tmp_path: Path) -> None:
    index, one, two = (tmp_path / name for name in ("README.md", "one.md", "two.md"))
    index.write_text("[one](one.md#part)")
    assert not_in(index, [index, one, two]) == [two]


# Commands.


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in the fenced blocks of a page."""
    for block in _FENCE.finditer(text):
        for line in block["body"].replace("\\\n", " ").splitlines():
            yield from _simple_commands(_OF_YAML.sub("", line))


def _simple_commands(line: str) -> Iterator[list[str]]:
    for inner in _SUBSTITUTED.findall(line):
        yield from _simple_commands(inner)
    found: list[str] = []
    for word in (*_words(line), ";"):
        if set(word) <= set("();<>|&"):
            if found:
                yield found
            found = []
        elif found or not _BEFORE_COMMANDS.fullmatch(word):
            found.append(word)


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # an apostrophe: prose, or a quotation that goes on
        return line.split()


def deploy_arguments(text: str) -> list[list[str]]:
    """Return the arguments of each `deploy` that a page tells people to type."""
    return [words[1:] for words in commands_in(text) if Path(words[0]).name == "deploy"]


def refusal(arguments: Sequence[str], root: Any = None) -> str:
    """Return why the `deploy` command would not take these arguments; "" if it would."""
    command, name, rest = root or get_command(whole_app()), "deploy", list(arguments)
    try:
        while hasattr(command, "commands"):
            if rest and rest[0] in _FOR_ALL_COMMANDS:
                return ""
            name, command, rest = command.resolve_command(typer.Context(command), rest)
        if "--help" not in rest:
            command.make_context(name, list(rest))
    except Exception as exc:
        if not hasattr(exc, "format_message"):
            raise
        return str(exc.format_message())
    return ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_can_be_typed(page: Path) -> None:
    said = deploy_arguments(page.read_text(encoding="utf-8"))
    assert {" ".join(words): why for words in said if (why := refusal(words))} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_scripts_exist(page: Path) -> None:
    first = [words[0] for words in commands_in(page.read_text(encoding="utf-8"))]
    assert [word for word in first if word.startswith("./") and not (REPO / word).exists()] == []


def test_commands_are_found_at_all() -> None:
    """Where the search went blind, nothing above could fail."""
    found = [words for page in PAGES for words in deploy_arguments(page.read_text("utf-8"))]
    assert len(found) > 60
    used = {" ".join(words[:2]) if words[:1] == ["images"] else words[0] for words in found}
    assert {"up", "plan", "check", "down", "status", "doctor", "swap", "images build"} <= used


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("deploy up --gpus 4      # builds; deploy what is missing", [["up", "--gpus", "4"]]),
        ("      - run: .venv/bin/deploy check --json > out.json", [["check", "--json"]]),
        ("    - deploy status --json || true", [["status", "--json"]]),
        ("A=1 B='2 3' deploy up && sudo deploy down; deploy logs", [["up"], ["down"], ["logs"]]),
        ("deploy plan \\\n  --gpus 2", [["plan", "--gpus", "2"]]),
        ("""kill "$(deploy status | awk '$1 == "x"')" """, [["status"]]),
        ("deploy images list | grep cpu", [["images", "list"]]),
        ("stop it      deploy down", []),
        ("it's a sentence on deploy up", []),
    ],
)
def test_commands_of_a_line(line: str, expected: list[list[str]]) -> None:
    assert deploy_arguments(f"```\n{line}\n```\n") == expected


def test_commands_outside_of_blocks_are_not_for_typing() -> None:
    assert deploy_arguments("deploy lift\n\n    deploy lift\n") == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("up --gpus 4 --model /models/x", ""),
        ("images build cpu router --build-arg A=B", ""),
        ("--version", ""),
        ("check --help", ""),
        ("lift", "lift"),
        ("images lift", "lift"),
        ("up --gpu-count 4", "--gpu-count"),
        ("up --gpus many", "--gpus"),
        ("plan --no-check", "--no-check"),
        ("images build", "names"),
        ("down now", "now"),
        ("up --model", "--model"),
    ],
)
def test_invalid_commands_are_found(arguments: str, said: str) -> None:
    why = refusal(arguments.split())
    assert said in why if said else not why


def test_a_script_that_is_gone_is_seen() -> None:
    text = "```\nsudo ./scripts/gone --all\n```\n"
    assert [words[0] for words in commands_in(text)] == ["./scripts/gone"]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "\n```bash\n" in page.read_text()], ids=name_of
)
def test_bash_blocks_are_valid(page: Path) -> None:
    scripts = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert scripts
    for script in scripts:
        subprocess.run(("bash", "-n"), input=script, text=True, check=True)


# Installing the kit.

# The name of the kit is a stranger's package on PyPI, and nobody has registered the distribution's.
_INSTALL = re.compile(r"\b(?:pip3?|pipx|uv|uvx) [^\n;&|`]*")
_KIT_BY_NAME = re.compile(
    r"(?<![\w./@-])(?:pdkit|prefill-decode-kit)(?:\[[\w,-]*\])?(?![\w./-])", re.I
)


def installs_by_name(text: str) -> list[str]:
    """Return the commands that fetch the kit by a name, from wherever the index has it."""
    commands = _INSTALL.findall(text.replace("\\\n", " "))
    return [
        command
        for command in (one.partition(" #")[0].strip() for one in commands)
        if _KIT_BY_NAME.search(command)
        and "--no-index" not in command
        and " uninstall " not in command
    ]


def test_nothing_installs_a_package_of_strangers() -> None:
    folders = ("deploy", "docs", "scripts", "images", "bench", "compose", ".github", ".ci")
    files = [file for at in folders for file in (REPO / at).rglob("*") if file.is_file()]
    texts = {
        name_of(file): file.read_text("utf-8")
        for file in [*files, *REPO.glob("*.md"), *REPO.glob("*.yaml"), REPO / "justfile"]
        if file.suffix in {"", ".md", ".py", ".sh", ".yaml", ".yml", ".txt", ".lock", ".json"}
    }
    assert len(texts) > 500
    assert {name: found for name, text in texts.items() if (found := installs_by_name(text))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install 'pdkit[report]'      # 34 MB", ["pip install 'pdkit[report]'"]),
        ("With `pip install pdkit` it", ["pip install pdkit"]),
        ("python3 -m pip install -q \\\n  PDKIT==0.1", ["pip install -q    PDKIT==0.1"]),
        ("uv tool install prefill-decode-kit", ["uv tool install prefill-decode-kit"]),
        ("uvx --from pdkit deploy up", ["uvx --from pdkit deploy up"]),
        ("pip install '.[report]'; deploy up --name pdkit", []),
        ("pip install --no-index --find-links kit-wheels prefill-decode-kit", []),
        ("pip install ./pdkit  # pdkit", []),
        ("pip install huggingface_hub && docker run pdkit/router:1", []),
    ],
)
def test_an_install_of_a_strangers_package_is_found(text: str, found: list[str]) -> None:
    assert installs_by_name(text) == found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_makes_the_environment_of_scripts_install(page: Path) -> None:
    """`pip install .` would put a copy of the kit where `scripts/install` has the checkout."""
    made = [words for words in commands_in(page.read_text("utf-8")) if "venv" in words]
    assert [words for words in made if words[-1] == ".venv"] == []
