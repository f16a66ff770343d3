"""The boundary, called in this process: answers and errors become text, JSON and exit codes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from deploy.cli import main as main_module
from deploy.cli.main import main
from deploy.cli.result import CommandResult
from deploy.errors import CheckFailed, StackUnhealthy
from deploy.runtime import logs
from deploy.verify.report import CheckReport
from tests.conftest import SETTLED
from tests.unit.output.test_views import PASSED

Result = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDKIT_HOME", str(tmp_path / "home"))
    for name, value in SETTLED.items():
        monkeypatch.setenv(name, value)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*arguments: str) -> Result:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[[CommandResult | BaseException], None]:
    """Let any command end with an answer or an exception."""

    def set_end(end: CommandResult | BaseException) -> None:
        def app(**_: object) -> CommandResult:
            if isinstance(end, BaseException):
                raise end
            return end

        monkeypatch.setattr(main_module, "app_for", lambda _: app)

    return set_end


class TestRealCommands:
    def test_plan_prints_a_table(self, run: Callable[..., Result]) -> None:
        code, out, err = run("plan", "--topology", "1p3d")
        assert (code, err) == (0, "")
        assert "consumer-2" in out

    def test_plan_prints_json(self, run: Callable[..., Result]) -> None:
        code, out, err = run("plan", "--gpus", "4", "--json")
        assert (code, err) == (0, "")
        envelope = json.loads(out)
        assert envelope["data"]["topology"] == "2p2d"
        assert (envelope["status"], envelope["exit_code"]) == ("ok", 0)

    def test_render_is_one_document(self, run: Callable[..., Result]) -> None:
        code, out, err = run("render")
        assert (code, err) == (0, "")
        assert yaml.safe_load(out)["stack"] == "pdkit"

    def test_render_json_holds_the_same_document(self, run: Callable[..., Result]) -> None:
        _, text, _ = run("render")
        _, out, _ = run("render", "--json")
        assert json.loads(out)["data"] == yaml.safe_load(text)

    def test_render_into_a_folder(self, run: Callable[..., Result], tmp_path: Path) -> None:
        code, out, _ = run("render", "-o", "out/deep")
        assert code == 0
        file = tmp_path / "out" / "deep" / "stack.yaml"
        assert "wrote out/deep/stack.yaml\nstart it with: deploy up --runtime process" in out
        assert file.read_text() == run("render")[1]

    def test_render_into_an_existing_file_is_refused(
        self, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        (tmp_path / "out").touch()
        code, out, err = run("render", "-o", "out")
        assert (code, out) == (2, "")
        assert "out" in err
        assert "Errno" not in err

    def test_a_file_that_was_found_is_named(
        self, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        (tmp_path / "deploy.yaml").write_text("name: mine\n")
        code, out, err = run("plan")
        assert code == 0
        assert "mine" in out
        assert "deploy.yaml" in err

    def test_environment_variables_are_settings(
        self, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PDKIT_TOPOLOGY", "1p2d")
        assert "1p2d" in run("plan")[1]
        assert "2p2d" in run("plan", "--gpus", "4")[1]

    def test_status_of_a_stack_that_is_not_up_says_so(self, run: Callable[..., Result]) -> None:
        assert run("status") == (0, "the stack 'pdkit' is not up\n", "")

    def test_watching_ends_quietly_by_ctrl_c(
        self, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(_seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("deploy.cli.watching.time.sleep", interrupted)
        code, out, err = run("status", "--watch")
        assert (code, err) == (0, "")
        assert out.count("not up; waiting for it") == 1

    def test_a_dry_run_checks_user_supplied_files(self, run: Callable[..., Result]) -> None:
        code, _, err = run("up", "--dry-run", "--api-key-file", "none")
        assert code == 2
        assert "error: --api-key-file: " in err
        assert "Errno" not in err

    def test_a_key_of_another_machine_is_not_looked_for(
        self, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        (tmp_path / "machine.yaml").write_text("cpus: 8\nmemory_mib: 65536\n")
        assert run("plan", "--inventory", "machine.yaml", "--api-key-file", "none")[0] == 0
        assert run("render", "--api-key-file", "none")[0] == 0, "nothing is written here"

    def test_down_of_a_stack_that_is_not_up_says_so(self, run: Callable[..., Result]) -> None:
        for _ in range(2):
            assert run("down") == (0, "the stack 'pdkit' was not up\n", "")

    def test_read_only_commands_leave_no_file(
        self, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        for command in ("plan", "render", "status", "down", "check", "logs"):
            run(command)
        assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []

    def test_down_clears_a_broken_state_file(
        self, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        file = tmp_path / "home" / "stacks" / "pdkit" / "state.json"
        file.parent.mkdir(parents=True)
        file.write_text("{")
        assert run("status")[0] == 2
        code, out, _ = run("down")
        assert (code, out) == (0, "the stack 'pdkit' is down\n")
        assert not file.exists()
        assert run("status")[0] == 0


class TestRunsOfCheck:
    """What `--junit` holds where a run does not come to its report."""

    @pytest.fixture(autouse=True)
    def _runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ends = iter([PASSED, PASSED, StackUnhealthy("not answering: router", hint="look")])

        def check_stack(*_: object) -> CheckReport:
            if isinstance(end := next(ends), StackUnhealthy):
                raise end
            return end

        monkeypatch.setattr("deploy.workflows.check.check_stack", check_stack)

    def test_results_of_earlier_runs_are_kept(
        self, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        code, out, err = run("check", "--repeat", "5", "--junit", "found.xml")
        assert (code, out) == (4, "")
        assert "error: not answering: router" in err
        found = (tmp_path / "found.xml").read_text()
        assert found.count("<testsuite ") == 3
        assert found.count('<error message="not answering: router"') == 1

    def test_a_file_that_cannot_be_written_does_not_hide_the_result(
        self, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        (tmp_path / "found.xml").mkdir()
        code, _, err = run("check", "--repeat", "5", "--junit", "found.xml")
        assert code == 4
        assert "warning: --junit found.xml cannot be written" in err
        assert "error: not answering: router" in err


class TestImages:
    """In no need of a Docker engine."""

    @pytest.fixture(autouse=True)
    def _no_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("deploy.workflows.catalog_images.engine_answers", lambda: False)

    def test_images_list_names_every_image(self, run: Callable[..., Result]) -> None:
        code, out, err = run("images", "list")
        assert (code, err) == (0, "")
        for name in ("cuda *", "rocm *", "rocm-seed", "cpu *", "router", "redis"):
            assert f"\n{name}" in out

    def test_images_list_prints_json(self, run: Callable[..., Result]) -> None:
        code, out, err = run("images", "list", "--json")
        assert (code, err) == (0, "")
        envelope = json.loads(out)
        assert (envelope["command"], envelope["status"]) == ("images list", "ok")
        rows = envelope["data"]["images"]
        assert {row["name"] for row in rows if row["default"]} == {"cuda", "rocm", "cpu"}
        assert set(rows[0]) == {
            "name", "image", "vendor", "default", "vllm", "lmcache", "verdict", "here", "size_mib",
            "how", "pinned", "age_days", "note",
        }  # fmt: skip
        assert not any(row["here"] for row in rows)

    def test_a_failure_names_its_own_command(self, run: Callable[..., Result]) -> None:
        code, out, _ = run("images", "build", "cpus", "--json")
        assert code == 2
        assert json.loads(out)["command"] == "images build"


class TestCompose:
    """Rendering and planning for containers, wherever this is run."""

    @pytest.mark.parametrize("vendor", ["cuda", "rocm", "cpu"])
    def test_render_prints_a_compose_document(
        self, run: Callable[..., Result], vendor: str
    ) -> None:
        code, out, err = run("render", "--runtime", "compose", "--vendor", vendor, "--gpus", "4")
        assert (code, err) == (0, "")
        assert list(yaml.safe_load(out)) == ["name", "services", "networks", "secrets", "x-pdkit"]

    def test_render_means_compose_unless_a_runtime_is_given(
        self, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PDKIT_RUNTIME")
        assert "x-pdkit" in yaml.safe_load(run("render")[1])

    def test_plan_says_what_it_assumes(self, run: Callable[..., Result]) -> None:
        code, out, _ = run("plan", "--runtime", "compose", "--vendor", "rocm", "--gpus", "8")
        assert code == 0
        assert "4p4d on rocm, runtime compose" in out
        assert "assumed: 8 GPUs" in out

    def test_plan_works_for_a_described_machine(
        self, run: Callable[..., Result], tmp_path: Path
    ) -> None:
        (tmp_path / "machine.yaml").write_text(
            "cpus: 8\nmemory_mib: 65536\ngpus: [{vendor: cuda, memory_mib: 24576, index: 3}]\n"
        )
        arguments = ("--runtime", "compose", "--vendor", "auto", "--inventory", "machine.yaml")
        code, out, err = run("plan", *arguments, "--json")
        assert (code, err) == (0, "")
        data = json.loads(out)["data"]
        assert (data["vendor"], data["topology"], data["gpu_share"]) == ("cuda", "1p1d", 0.45)
        assert [engine["devices"] for engine in data["engines"]] == [[3], [3]]

    def test_render_writes_a_folder(self, run: Callable[..., Result], tmp_path: Path) -> None:
        code, out, _ = run("render", "--runtime", "compose", "-o", "out", "--json")
        assert code == 0
        data = json.loads(out)["data"]
        assert str(tmp_path / "out" / "compose.yaml") in data["files"]
        assert data["start"].startswith("docker compose -f ")
        assert all(Path(file).is_file() for file in data["files"])


class TestLogs:
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        folder = tmp_path / "home" / "stacks" / "pdkit" / "logs"
        folder.mkdir(parents=True)
        (folder / "redis.log").write_text("r1\nr2\n")
        (folder / "router.log").write_text("x1\n")

    def test_logs_of_all_services_have_their_names(self, run: Callable[..., Result]) -> None:
        assert run("logs") == (0, "redis | r1\nredis | r2\nrouter | x1\n", "")

    def test_logs_of_one_service_have_no_name(self, run: Callable[..., Result]) -> None:
        assert run("logs", "redis", "-n", "1") == (0, "r2\n", "")

    def test_zero_lines_are_none(self, run: Callable[..., Result]) -> None:
        assert run("logs", "-n", "0") == (0, "", "")

    def test_logs_print_json(self, run: Callable[..., Result]) -> None:
        code, out, _ = run("logs", "router", "--json")
        assert code == 0
        assert json.loads(out)["data"]["lines"] == [{"service": "router", "line": "x1"}]

    def test_an_unknown_service_is_refused_with_the_known_ones(
        self, run: Callable[..., Result]
    ) -> None:
        code, out, err = run("logs", "rooter")
        assert (code, out) == (2, "")
        assert "redis, router" in err

    def test_following_ends_quietly_by_ctrl_c(
        self, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def follow(*_: object) -> Iterator[tuple[str, str]]:
            yield "redis", "r3"
            raise KeyboardInterrupt

        monkeypatch.setattr(logs, "follow", follow)
        assert run("logs", "redis", "-f") == (0, "r1\nr2\nr3\n", "")

    def test_following_as_json_is_refused(self, run: Callable[..., Result]) -> None:
        code, out, _ = run("logs", "-f", "--json")
        assert code == 2
        assert json.loads(out)["errors"][0]["code"] == "usage"

    def test_a_stack_without_logs_is_an_error(self, run: Callable[..., Result]) -> None:
        code, _, err = run("logs", "--name", "other")
        assert code == 2
        assert "'other' has no logs" in err
        assert "deploy up --name other" in err


class TestEndings:
    def test_a_result_with_an_error_prints_both(
        self, run: Callable[..., Result], ending: Callable[..., None]
    ) -> None:
        ending(
            CommandResult(
                "check", {"passed": False}, "table", [CheckFailed("no hits", hint="look")]
            )
        )
        assert run("check") == (1, "table\n", "error: no hits\ntry: look\n")
        code, out, err = run("check", "--json")
        envelope = json.loads(out)
        assert (code, err) == (1, "")
        assert envelope["data"] == {"passed": False}
        assert envelope["errors"][0]["message"] == "no hits"

    def test_an_error_prints_its_details(
        self, run: Callable[..., Result], ending: Callable[..., None]
    ) -> None:
        ending(StackUnhealthy("it died", hint="less log", details=("last", "words")))
        expected = "error: it died\n  | last\n  | words\ntry: less log\n"
        assert run("up") == (4, "", expected)

    def test_ctrl_c_exits_with_130(
        self, run: Callable[..., Result], ending: Callable[..., None]
    ) -> None:
        ending(KeyboardInterrupt())
        code, out, err = run("up")
        assert (code, out) == (130, "")
        assert err.startswith("error: interrupted")
        code, out, _ = run("up", "--json")
        assert (code, json.loads(out)["exit_code"]) == (130, 130)

    def test_a_full_disk_is_a_clear_error(
        self, run: Callable[..., Result], ending: Callable[..., None]
    ) -> None:
        ending(OSError(28, "No space left on device", "/disk/file"))
        code, out, err = run("up")
        assert (code, out) == (3, "")
        assert "No space left on device" in err
        assert "/disk/file" in err

    def test_a_bug_shows_its_traceback_and_has_its_own_exit_code(
        self, run: Callable[..., Result], ending: Callable[..., None]
    ) -> None:
        ending(RuntimeError("oops"))
        code, out, err = run("up", "--json")
        assert code not in (0, 1, 2, 3, 4, 130)
        assert "Traceback" in err
        assert json.loads(out)["errors"][0]["message"] == "RuntimeError: oops"
