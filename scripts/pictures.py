"""Draw the pictures in docs/images, each light and dark.

    python scripts/pictures.py diagram     how a request passes through a stack
    python scripts/pictures.py terminal    `deploy up` and `deploy status --watch`, from a real run

The second one starts a 1p1d stack on this machine's CPUs, loads it with `deploy bench`, and stops
it. Its state is kept in a temporary folder.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
_COLOURS: Mapping[str, Mapping[str, str]] = {
    "light": {"text": "#1f2328", "soft": "#59636e", "line": "#818b98", "box": "#f6f8fa",
              "prefill": "#0969da", "decode": "#8250df", "store": "#bc4c00"},
    "dark": {"text": "#f0f6fc", "soft": "#9198a1", "line": "#656c76", "box": "#151b23",
             "prefill": "#4493f8", "decode": "#ab7df8", "store": "#db6d28"},
}  # fmt: skip
_THEMES: Mapping[str, TerminalTheme] = {"light": DEFAULT_TERMINAL_THEME, "dark": DIMMED_MONOKAI}
_COLUMNS = 106
_UP = ("up", "--vendor", "cpu", "--runtime", "process")
_WATCH = ("status", "--watch")
_LOAD = ("bench", "--workload", "multi-turn", "--concurrency", "6", "--requests", "400")


def main() -> None:
    """Draw what the arguments name."""
    drawings = {"diagram": draw_diagram, "terminal": draw_terminal}
    for name in sys.argv[1:] or ["diagram"]:
        drawings[name]()


def draw_diagram() -> None:
    """Write the diagram."""
    for mode in _COLOURS:
        (IMAGES / f"stack-{mode}.svg").write_text(diagram(mode), encoding="utf-8")


def diagram(mode: str) -> str:
    """Return the diagram as SVG, for a light or a dark page."""
    colours = _COLOURS[mode]
    parts = [
        _box(10, 105, 110, "client", "OpenAI API", "@line"),
        _box(190, 105, 130, "router", "picks a pair", "@line"),
        _box(420, 20, 150, "producer", "prefill", "@prefill"),
        _box(420, 190, 150, "consumer", "decode", "@decode"),
        _box(690, 105, 120, "Redis", "KV store", "@store"),
        _arrow("M120 135 H184"),
        _arrow("M320 122 H350 Q370 122 370 102 V70 Q370 50 390 50 H414"),
        _arrow("M320 148 H350 Q370 148 370 168 V200 Q370 220 390 220 H414"),
        _arrow("M570 50 H730 Q750 50 750 70 V99"),
        _arrow("M750 165 V200 Q750 220 730 220 H576"),
        _label(340, 40, "1 prompt"),
        _label(340, 250, "3 prompt"),
        _label(660, 40, "2 stores KV"),
        _label(660, 250, "4 loads KV, generates"),
    ]
    text = _DIAGRAM.format(body="\n".join(parts))
    return re.sub(r"@(\w+)", lambda match: colours[match[1]], text)


_DIAGRAM = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 270" font-family="system-ui, sans-serif">
<title>A client's prompt goes through the router to a producer, which stores its KV in Redis; then
to a consumer, which loads that KV and generates the answer.</title>
<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="@line"/></marker></defs>
{body}
</svg>
"""


def _box(x: int, y: int, width: int, name: str, role: str, colour: str) -> str:
    middle = x + width // 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="60" rx="8" fill="@box" stroke="{colour}" '
        'stroke-width="2"/>\n'
        f'<text x="{middle}" y="{y + 27}" font-size="17" font-weight="600" fill="@text" '
        f'text-anchor="middle">{name}</text>\n'
        f'<text x="{middle}" y="{y + 47}" font-size="13" fill="@soft" '
        f'text-anchor="middle">{role}</text>'
    )


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="@line" stroke-width="2" marker-end="url(#tip)"/>'


def _label(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="14" fill="@text" text-anchor="middle">{text}</text>'


def draw_terminal() -> None:
    """Run a stack, and write what the terminal shows of it."""
    with tempfile.TemporaryDirectory() as folder, _stack(Path(folder)) as started:
        load = subprocess.Popen(
            _deploy(*_LOAD), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            frames = _output(*_WATCH, "--interval", "3", "--count", "6")
        finally:
            load.terminate()
            load.wait(60)
    *_, last = re.split(r"\n\n(?=stack ')", frames.rstrip("\n"))
    _picture("up", _UP, started)
    _picture("watch", _WATCH, last)


@contextmanager
def _stack(folder: Path) -> Iterator[str]:
    """Start a stack whose state is in a folder; yield what `deploy up` printed."""
    os.environ["PDKIT_HOME"] = str(folder / "home")
    os.chdir(folder)
    try:
        shown = _output(*_UP).replace(str(folder / "home" / "cache"), "~/.cache/pdkit")
        yield shown.replace(sys.executable, ".venv/bin/python")
    finally:
        _output("down")


def _output(*arguments: str) -> str:
    done = subprocess.run(
        _deploy(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"deploy {arguments[0]} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def _deploy(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "deploy", *arguments)


def _picture(name: str, arguments: tuple[str, ...], output: str) -> None:
    command = " ".join(("deploy", *arguments))
    for mode, theme in _THEMES.items():
        console = Console(record=True, width=_COLUMNS, file=io.StringIO(), highlight=False)
        console.print(f"[bold]$ {command}[/bold]")
        console.print(output.rstrip("\n"), markup=False)
        svg = console.export_svg(
            title=command, theme=theme, code_format=_without_fonts(), unique_id=f"{name}-{mode}"
        )
        (IMAGES / f"{name}-{mode}.svg").write_text(svg, encoding="utf-8")


def _without_fonts() -> str:
    """Return rich's template without the fonts that it would download."""
    text = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.S)
    return text.replace("Fira Code,", "ui-monospace, Menlo, Consolas,")


if __name__ == "__main__":
    main()
