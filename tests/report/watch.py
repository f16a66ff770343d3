"""What a worker's stacks are seen to do: the engines that start, and the secrets they are given."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath

from deploy.connector.pdkit_connector.redaction import MASK, Redactor, secrets_in
from deploy.runtime.process.launcher import MARKER

_EVERY_S = 0.5
_LOOKS = 4  # at each process
_ENGINE = b"pdkit_connector.serve"
# A secret that the kit makes. `up` removes it when it fails, perhaps before anybody has seen it.
_MADE = re.compile(r"(?<![\w-])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])[\w-]{43,}(?![\w-])", re.ASCII)


class Watch:
    """Look twice a second at the stacks whose files lie below a folder, one folder a home.

    The machine's own processes are counted, so that no way to start an engine is left out: by
    `deploy`, by a test's own hands, by Docker after a crash. Only one that ends within half a
    second may be missed; an engine needs longer to import vLLM.

    Attributes:
        engines: process → folder of its stack.
    """

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        self.folder = folder
        self.engines: dict[str, str] = {}
        self._proc = proc
        self._looks: dict[Path, int] = {}
        self._secrets: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        # Processes have the stack's folder in their environment. Containers show it as the source
        # of a mount, maybe less a mount point.
        tail = re.escape("/".join(folder.parts[-2:]))
        self._stack = {
            "environ": re.compile(rf"\b{MARKER}=[^\0]*({tail}/[^\0]+)"),
            "mountinfo": re.compile(rf" \S*({tail}/\S+)/(?:secrets|run)/"),
        }

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Note the engines that run now, and the secrets in the stacks' folders."""
        # What a process runs shows as soon as it has executed it.
        processes = self._proc.glob("[0-9]*")
        self._looks = {process: self._looks.get(process, 0) + 1 for process in processes}
        for process in (one for one, looks in self._looks.items() if looks <= _LOOKS):
            with suppress(OSError):
                if _ENGINE in (process / "cmdline").read_bytes().split(b"\0"):
                    self._note_engine(process)
        for pattern in ("*/secrets/*", "*/stacks/*/secrets/*"):
            for file in self.folder.glob(pattern):
                with suppress(OSError):
                    text = file.read_text()
                    self._secrets |= {*text.split(), *secrets_in(text)}

    def redacted(self, text: str) -> str:
        """Return a text without secrets: those seen, and what has the form of one."""
        redact = Redactor(tuple(self._secrets))
        # Line by line: it cuts the end off what is long, and whole logs are.
        return "".join(_MADE.sub(MASK, redact(line)) for line in text.splitlines(keepends=True))

    def _note_engine(self, process: Path) -> None:
        # Behind the program's name, which may hold anything, from the third field on.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        session, began = fields[3], fields[19]
        if session != process.name:
            return  # a helper that the engine has forked
        for file, stack in self._stack.items():
            if found := stack.search((process / file).read_text(errors="replace")):
                self.engines[f"{process.name} {began}"] = found[1]

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.look()


def engine_starts(stacks: Iterable[str]) -> str:
    """Return how often engines were started, given the folder of the stack of each."""
    counted = Counter(stacks)
    by_stack = ", ".join(f"{PurePath(at).name} {n}" for at, n in counted.most_common())
    shown = f"{counted.total()} engine starts in {len(counted)} stacks"
    return f"{shown}: {by_stack}" if by_stack else shown
