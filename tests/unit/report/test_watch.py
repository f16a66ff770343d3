"""Engines are counted once each, whoever started them; what is secret stays so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.runtime.process.launcher import MARKER
from deploy.runtime.secrets import ensure_secrets
from tests.report.watch import Watch, engine_starts

ENGINE = ("python", "-m", "pdkit_connector.serve", "--model", "m")


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path / "pytest-1" / "gw0", tmp_path / "proc")


def runs(
    watch: Watch, pid: int, *, stack: str = "", mount: str = "", session: int = 0,
    began: int = 7, argv: tuple[str, ...] = ENGINE,
) -> None:  # fmt: skip
    """Let a process show in /proc."""
    folder = watch._proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cmdline").write_text("\0".join((*argv, "")))
    fields = [0] * 17 + [began, 0]
    shown = " ".join(map(str, ["S", 1, pid, session or pid, *fields[2:]]))
    (folder / "stat").write_text(f"{pid} (a b) c) {shown}")
    (folder / "environ").write_text(f"PATH=/bin\0PDKIT_HOME={watch.folder}\0{MARKER}={stack}\0")
    (folder / "mountinfo").write_text(f"1 2 0:1 / / rw\n3 2 0:1 {mount} /run/secrets/x ro\n")


class TestEngines:
    def test_each_engine_is_counted_once(self, watch: Watch) -> None:
        one = f"{watch.folder}/home0/stacks/one"
        runs(watch, 11, stack=one)
        runs(watch, 12, stack=one)
        watch.look()
        runs(watch, 11, stack=one, began=8)  # the number is used again
        for _ in range(2):
            watch.look()
        assert engine_starts(watch.engines.values()) == "3 engine starts in 1 stacks: one 3"

    def test_a_process_that_becomes_an_engine_is_counted(self, watch: Watch) -> None:
        one = f"{watch.folder}/home0/stacks/one"
        runs(watch, 11, stack=one, argv=("deploy", "up"))
        watch.look()
        runs(watch, 11, stack=one)
        watch.look()
        assert len(watch.engines) == 1

    @pytest.mark.parametrize("file", ["secrets/redis_password", "run/producer-0/lmcache.yaml"])
    def test_engines_in_containers_are_counted(self, watch: Watch, file: str) -> None:
        """The mount's source lacks /tmp where that is a file system of its own."""
        runs(watch, 11, mount=f"/pytest-1/gw0/home0/stacks/boxed/{file}")
        watch.look()
        assert engine_starts(watch.engines.values()).endswith("1 stacks: boxed 1")

    def test_engines_of_other_runs_are_not_counted(self, watch: Watch) -> None:
        one = f"{watch.folder}/home0/stacks/one"
        runs(watch, 11, stack="/tmp/pytest-2/gw0/home0/stacks/other")
        runs(watch, 12, stack=one, session=11)  # forked by an engine
        runs(watch, 13, stack=one, argv=("python", "-c", "import pdkit_connector.serve"))
        runs(watch, 14, mount="/pytest-2/gw0/home0/stacks/other/secrets/x")
        watch.look()
        assert watch.engines == {}
        assert engine_starts([]) == "0 engine starts in 0 stacks"


class TestSecrets:
    def test_deleted_secrets_stay_known(self, watch: Watch) -> None:
        file = watch.folder / "home0" / "stacks" / "one" / "secrets" / "api_key"
        file.parent.mkdir(parents=True)
        file.write_text("first-key\nredis://me:pass-word@host\n")
        watch.look()
        file.unlink()
        assert watch.redacted("Bearer first-key, pass-word") == "Bearer ***, ***"

    def test_a_long_log_keeps_its_last_lines(self, watch: Watch) -> None:
        said = "a line that is nothing special\n" * 5000
        told = watch.redacted(f"{said}redis://me:pass-word@host\nwhy it died\n")
        assert told == f"{said}redis://***@host\nwhy it died\n"

    def test_secrets_are_read_in_the_background(
        self, watch: Watch, eventually: Callable[..., None]
    ) -> None:
        file = watch.folder / "home0" / "stacks" / "one" / "secrets" / "api_key"
        file.parent.mkdir(parents=True)
        with watch:
            file.write_text("first-key")
            eventually(lambda: watch.redacted("first-key") == "***")

    def test_generated_secrets_are_recognized_by_their_form(
        self, watch: Watch, tmp_path: Path
    ) -> None:
        made = ensure_secrets(tmp_path, ("a", "b"))
        for secret in (made["a"].reveal(), made["b"].reveal()):
            for text in (f"requirepass {secret}", repr(f"\n{secret}\n"), f"'{secret}'"):
                assert secret not in watch.redacted(text)

    def test_secrets_in_urls_are_masked(self, watch: Watch) -> None:
        assert watch.redacted("redis://:open@host:1/0") == "redis://***@host:1/0"

    @pytest.mark.parametrize(
        "text", ["0f" * 32, "test_" * 12, "a/LongPath/" * 9, "pdkit_connector.errors.StoreGone: x"]
    )
    def test_other_text_is_not_changed(self, watch: Watch, text: str) -> None:
        assert watch.redacted(text) == text
