"""Reading logs while they are written."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.runtime import logs
from deploy.runtime.logs import FileReader, complaints, first_error, follow, last_lines, plain


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


class TestLastLines:
    @pytest.mark.parametrize(
        ("count", "expected"),
        [(0, ()), (1, ("c",)), (2, ("b", "c")), (3, ("a", "b", "c")), (9, ("a", "b", "c"))],
    )
    def test_the_last_lines_are_returned(
        self, file: Path, count: int, expected: tuple[str, ...]
    ) -> None:
        file.write_text("a\nb\nc\n")
        assert last_lines(file, count) == expected

    def test_all_lines_are_returned_without_a_count(self, file: Path) -> None:
        file.write_text("line\n" * 100_000)
        assert len(last_lines(file)) == 100_000

    def test_the_freed_part_of_a_log_is_skipped(self, file: Path) -> None:
        """As an engine leaves a log: its oldest part is a hole, far larger than the memory."""
        with file.open("wb") as log:
            log.truncate(1 << 42)
            log.seek(0, 2)
            log.write(b"a\nb\n")
        assert last_lines(file) == last_lines(file, 9) == ("a", "b")

    def test_a_line_without_an_end_counts(self, file: Path) -> None:
        file.write_text("a\nlast words")
        assert last_lines(file, 1) == ("last words",)

    def test_a_missing_file_has_no_lines(self, file: Path) -> None:
        assert last_lines(file, 5) == ()
        file.touch()
        assert last_lines(file, 5) == ()

    def test_a_large_log_is_read_from_its_end(self, file: Path) -> None:
        file.write_text("".join(f"line {number}\n" for number in range(200_000)))
        assert last_lines(file, 2) == ("line 199998", "line 199999")

    @pytest.mark.parametrize(
        ("raw", "plain"),
        [
            ("\x1b[31mred\x1b[0m", "red"),
            ("\x1b[1;32mINFO\x1b[0m \x1b[36m(Worker)\x1b[0m ok", "INFO (Worker) ok"),
            ("\x1b[2K\x1b[1Gdone", "done"),
            ("\x1b[?25lhidden cursor\x1b[?25h", "hidden cursor"),
            ("a [31m that is none", "a [31m that is none"),
            ("a\x1b]52;c;ZXZpbA==\x07b", "ab"),
            ("a\x1b]0;title\x1b\\b", "ab"),
            ("a\x1bPdevice\x1b\\b\x1b^private\x1b\\c", "abc"),
            ("a\x1bcb\x1b(0c\x1b", "abc"),
            ("a\x9b31mb\x9d52;c;x\x07\x08\x00", "a31mb52;c;x"),
            ("a\x1b]52;c;no end", "a52;c;no end"),
            ("tab\tstays, and ü", "tab\tstays, and ü"),
        ],
    )
    def test_control_characters_are_removed(self, file: Path, raw: str, plain: str) -> None:
        file.write_text(raw + "\n")
        assert last_lines(file, 1) == (plain,)

    def test_binary_output_does_not_stop_it(self, file: Path) -> None:
        file.write_bytes(b"\xff\xfe ok\n")
        assert last_lines(file, 1)[0].endswith(" ok")


class TestFirstError:
    def test_the_first_one_is_named(self) -> None:
        lines = (
            "INFO: ok",
            "(EngineCore pid=3) ERROR 07-27 03:00:00 [core.py:866] ValueError: too big",
            "RuntimeError: engine failed",
        )
        assert first_error(lines) == "ValueError: too big"

    def test_an_exception_of_a_module_is_found(self) -> None:
        assert first_error(["torch.OutOfMemoryError: none left "]) == (
            "torch.OutOfMemoryError: none left"
        )

    def test_the_connectors_own(self) -> None:
        """They are no ...Error by name; what vLLM says after them names no cause."""
        lines = (
            "(EngineCore pid=7) ERROR 11-21 12:22:48 [core.py:9] "
            "pdkit_connector.errors.UnsupportedSetting: use_native: true",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        )
        assert first_error(lines).endswith("UnsupportedSetting: use_native: true")

    def test_a_log_without_errors_has_none(self) -> None:
        assert first_error([]) == ""

    def test_words_within_a_line_are_none(self) -> None:
        assert first_error(("it said ValueError: x", "")) == ""


class TestComplaints:
    """Lines as the programs of a real stack write them."""

    @pytest.mark.parametrize(
        ("line", "level", "text"),
        [
            (
                "(EngineCore pid=24185) WARNING 11-21 12:22:48 [cpu_worker.py:114] it is slow",
                "warning",
                "it is slow",
            ),
            (
                "(APIServer pid=7) ERROR 11-21 12:22:48 [serving.py:9] it is full",
                "error",
                "it is full",
            ),
            (
                "[2026-11-21 12:22:54,302] LMCache WARNING: the sender is not there "
                "(local_cpu_backend.py:105:lmcache.v1.storage_backend.local_cpu_backend)",
                "warning",
                "the sender is not there",
            ),
            (
                "2026-11-21 12:22:54,302 WARNING pdkit-connector WARNING Redis: a call was late",
                "warning",
                "Redis: a call was late",
            ),
            (
                "(EngineCore pid=3) 2026-11-21 12:22:54,302 ERROR pdkit-connector ERROR it broke",
                "error",
                "it broke",
            ),
            (
                "2026-11-21 12:23:50 WARNING router: consumer-0 does not answer",
                "warning",
                "consumer-0 does not answer",
            ),
            (
                "24061:M 21 Nov 2026 12:22:22.921 # WARNING Memory overcommit must be enabled!",
                "warning",
                "Memory overcommit must be enabled!",
            ),
            ("ERROR:    Exception in ASGI application", "error", "Exception in ASGI application"),
            ("redis.exceptions.TimeoutError: too slow", "error",
             "redis.exceptions.TimeoutError: too slow"),
        ],
    )  # fmt: skip
    def test_warnings_and_errors_of_each_program_are_found(
        self, line: str, level: str, text: str
    ) -> None:
        (found,) = complaints([("consumer-0", line)])
        assert (found.service, found.level, found.text) == ("consumer-0", level, text)

    @pytest.mark.parametrize(
        "line",
        [
            "",
            'INFO:     127.0.0.1:52968 - "GET /health HTTP/1.1" 200 OK',
            "(APIServer pid=7) INFO 11-21 12:22:48 [launcher.py:9] the ERROR page is served",
            "[2026-11-21 12:23:50,224] LMCache INFO: Reqid: x (a.py:1:b)",
            "24061:M 21 Nov 2026 12:22:22.921 * Ready to accept connections",
            "2026-11-21 12:22:54,302 INFO pdkit-connector fix=B17 state=applied",
            "2026-11-21 12:22:56 INFO router: consumer-0 answers",
            "prompt: WARNING 11-21 12:22:48 [x.py:1] a client wrote this",
        ],
    )
    def test_other_lines_are_none(self, line: str) -> None:
        assert complaints([("consumer-0", line)]) == ()

    def test_the_exception_of_a_traceback_is_reported(self) -> None:
        start = "(EngineCore pid=3) ERROR 07-27 03:00:00 [core.py:866] "
        said = ("it met a fatal error.", "Traceback (most recent call last):", '  File "x.py"',
                "    raise OSError", "OSError: no space", "RuntimeError: died of it")  # fmt: skip
        (found,) = complaints([("consumer-0", start + words) for words in said])
        assert (found.text, found.count) == ("OSError: no space", 1)

    def test_repeated_warnings_are_reported_once(self) -> None:
        lines = [
            ("consumer-0", f"(E pid=3) WARNING 07-27 03:00:0{n} [core.py:8] request {n} is late")
            for n in range(4)
        ]
        first, other = complaints([*lines, ("producer-0", lines[0][1])])
        assert (first.text, first.count) == ("request 0 is late", 4)
        assert (other.service, other.count) == ("producer-0", 1)


class TestFollow:
    """`follow` sleeps between looks; here each of its sleeps is one step of what happens."""

    @pytest.fixture
    def while_it_sleeps(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def plan(*steps: Callable[[], object]) -> None:
            coming = itertools.chain(steps, (self._fail for _ in itertools.count()))
            sleep = SimpleNamespace(sleep=lambda _seconds: next(coming)())
            monkeypatch.setattr(logs, "time", sleep)

        return plan

    @staticmethod
    def _fail() -> None:
        raise AssertionError("it waits for more than was written")

    def test_only_appended_lines_are_followed(
        self, file: Path, while_it_sleeps: Callable[..., None]
    ) -> None:
        file.write_text("old\n")
        while_it_sleeps(lambda: append(file, "one\ntwo\n"), lambda: append(file, "three\n"))
        assert take(3, {"engine": file}) == [
            ("engine", "one"), ("engine", "two"), ("engine", "three"),
        ]  # fmt: skip

    def test_a_line_is_shown_when_it_is_whole(
        self, file: Path, while_it_sleeps: Callable[..., None]
    ) -> None:
        while_it_sleeps(lambda: append(file, "ha"), lambda: append(file, "lf\n"))
        assert take(1, {"engine": file}) == [("engine", "half")]

    def test_a_letter_cut_in_two_is_whole_again(
        self, file: Path, while_it_sleeps: Callable[..., None]
    ) -> None:
        first, second = "é\n".encode()[:1], "é\n".encode()[1:]
        while_it_sleeps(lambda: append(file, first), lambda: append(file, second))
        assert take(1, {"engine": file}) == [("engine", "é")]

    def test_a_recreated_file_is_read_from_its_start(
        self, file: Path, while_it_sleeps: Callable[..., None]
    ) -> None:
        file.write_text("a long first life\n")
        while_it_sleeps(lambda: file.write_text("second\n"), lambda: append(file, "more\n"))
        assert take(2, {"engine": file}) == [("engine", "second"), ("engine", "more")]

    def test_a_file_that_comes_later(
        self, file: Path, while_it_sleeps: Callable[..., None]
    ) -> None:
        while_it_sleeps(lambda: None, lambda: file.write_text("born\n"))
        assert take(1, {"engine": file}) == [("engine", "born")]

    def test_several_files_by_name(
        self, tmp_path: Path, while_it_sleeps: Callable[..., None]
    ) -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        while_it_sleeps(lambda: append(two, "b\n"), lambda: append(one, "\x1b[31ma\x1b[0m\n"))
        assert take(2, {"1": one, "2": two}) == [("2", "b"), ("1", "a")]


def append(file: Path, text: str | bytes) -> None:
    with file.open("ab") as sink:
        sink.write(text.encode() if isinstance(text, str) else text)


def take(count: int, files: dict[str, Path]) -> list[tuple[str, str]]:
    return list(itertools.islice(follow(FileReader(files)), count))


@pytest.mark.parametrize("piece", [" ", "a", "a.", "(a:1:", "Error", "\x1b]", "] "])
@pytest.mark.parametrize("start", ["", "[2026-11-22 18:23:45,402] LMCache WARNING: x", "(a "])
def test_a_long_line_takes_time_in_proportion(start: str, piece: str) -> None:
    """Clients choose much of what is logged."""

    def seconds(length: int) -> float:
        line = f"{start}{piece * (length // len(piece))}y"
        began = time.thread_time()
        complaints([("engine", plain(line))])
        first_error([line])
        return time.thread_time() - began

    short, long = min(seconds(1 << 12) for _ in range(3)), seconds(1 << 16)
    # 16 times the text; 256 times the seconds were it quadratic.
    assert long < 64 * max(short, 0.001)
