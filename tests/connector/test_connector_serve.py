"""The way into an engine: what it reads of vLLM's arguments, and how it refuses to start."""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from own_process import last_line, run_python
from pdkit_connector import serve
from pdkit_connector.errors import ConnectorError, FixFailed
from pdkit_connector.identity.kv_identity import ROWS
from pdkit_connector.identity.model_files import (
    DIGEST_VARIABLE,
    NAMED_VARIABLE,
    files_digest,
    model_files,
    named_files,
    take_digests,
)
from pdkit_connector.worker_socket import NAME_ENV, engine_name


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ((), {}),
        (("--model", "m", "--kv-transfer-config"), {}),
        (("--kv-transfer-config", "no JSON"), {}),
        (("--kv-transfer-config", "[]"), {}),
        (("--kv-transfer-config", json.dumps({"kv_role": "kv_both"})), {}),
        (
            ("--kv-transfer-config", json.dumps({"kv_connector_extra_config": {"a": 1}})),
            {"a": 1},
        ),
    ],
)
def test_extra_configuration_is_read_from_the_arguments(argv, found):
    assert serve.extra_config(argv) == found


@pytest.mark.parametrize(
    ("argv", "may"),
    [
        ((), False),
        (("--model", "m", "--kv-cache-memory-bytes", "1", "--middleware", "config"), False),
        (("--kv-transfer-config", "{}"), True),
        (("--kv_transfer_config={}",), True),
        (("--kv-transfer-config.kv_role", "kv_both"), True),
        (("--kv-offloading-backend", "lmcache"), True),
        (("--config=engine.yaml",), True),
    ],
)
def test_every_way_to_name_a_connector_is_seen(argv, may):
    assert serve.may_load_connector(argv) is may


class TestTheModelsFiles:
    """Docker starts an engine again without the kit: the engine itself compares."""

    @pytest.fixture
    def argv(self, tmp_path, monkeypatch):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_text(name)
        monkeypatch.setenv(DIGEST_VARIABLE, files_digest(model_files(tmp_path)))
        return ("--model", str(tmp_path), "--port", "8000")

    def test_the_planned_files_are_served(self, argv, tmp_path):
        (tmp_path / "README.md").write_text("new")
        serve.require_planned_model(argv)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_others_are_refused(self, argv, tmp_path, name):
        (tmp_path / name).write_text("another")
        with pytest.raises(
            ConnectorError, match="have changed since this stack was started"
        ) as caught:
            serve.require_planned_model(argv)
        assert str(tmp_path) in str(caught.value)
        assert "deploy restart" in str(caught.value)

    def test_other_bytes_of_equal_size_and_time_are_refused(self, argv, tmp_path):
        weights = tmp_path / "model.safetensors"
        at = weights.stat().st_mtime_ns
        weights.write_text("MODEL.safetensors")
        os.utime(weights, ns=(at, at))
        with pytest.raises(ConnectorError, match="have changed"):
            serve.require_planned_model(argv)

    @pytest.mark.usefixtures("argv")
    def test_the_same_bytes_elsewhere_and_of_another_time_are_served(self, tmp_path):
        """As a container mounts them."""
        mounted = shutil.copytree(tmp_path, tmp_path.with_name("mounted"))
        for file in mounted.iterdir():
            os.utime(file, (1, 1))
        serve.require_planned_model(("--model", str(mounted)))

    def test_a_file_that_cannot_be_read_is_named(self, argv, monkeypatch):
        opened = os.open

        def refuse(path, *more, **others):
            if str(path).endswith("model.safetensors"):
                raise PermissionError(13, "Permission denied")
            return opened(path, *more, **others)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(ConnectorError, match=r"model.safetensors cannot be read: Permission"):
            serve.require_planned_model(argv)

    def test_a_folder_that_is_gone_is_refused(self, argv, tmp_path):
        shutil.rmtree(tmp_path)
        with pytest.raises(ConnectorError):
            serve.require_planned_model(argv)

    def test_a_model_of_which_the_plan_names_no_files_is_served(self, monkeypatch):
        monkeypatch.delenv(DIGEST_VARIABLE, raising=False)
        serve.require_planned_model(("--model", "owner/name"))

    def test_other_files_that_another_argument_names_are_refused(self, argv, tmp_path, monkeypatch):
        adapter = tmp_path / "code" / "adapter"
        adapter.mkdir(parents=True)
        (adapter / "adapter_model.safetensors").write_text("adapter")
        argv = (*argv, "--lora-modules", f"one={adapter}")
        monkeypatch.setenv(NAMED_VARIABLE, files_digest(named_files(argv)))
        serve.require_planned_model(argv)
        (adapter / "adapter_model.safetensors").write_text("ADAPTER")
        with pytest.raises(ConnectorError, match=r"files that arguments name .* have changed") as e:
            serve.require_planned_model(argv)
        assert str(adapter) in str(e.value)

    def test_files_that_the_plan_does_not_know_are_the_engines_identity(self, argv, tmp_path):
        """As in a pod, to which somebody gave a volume with a model."""
        argv = (*argv, "--tokenizer", str(tmp_path))
        found = []
        for text in ("one", "other"):
            (tmp_path / "model.safetensors").write_text(text)
            found.append({})
            take_digests(argv, found[-1])
            assert found[-1].keys() == {DIGEST_VARIABLE, NAMED_VARIABLE}
        assert found[0] != found[1]
        planned = {DIGEST_VARIABLE: "abc", NAMED_VARIABLE: "def"}
        take_digests(argv, planned)
        assert planned == {DIGEST_VARIABLE: "abc", NAMED_VARIABLE: "def"}
        none = {}
        take_digests(("--model", "owner/name"), none)
        assert none == {}

    def test_the_engine_takes_them_before_it_loads_anything(self, argv, monkeypatch):
        monkeypatch.delenv(DIGEST_VARIABLE)
        monkeypatch.setenv(NAMED_VARIABLE, "")
        serve.require_planned_model(argv)
        assert os.environ[DIGEST_VARIABLE] == files_digest(model_files(Path(argv[1])))

    def test_the_engine_ends_before_it_loads_anything(self, argv, tmp_path):
        (tmp_path / "model.safetensors").write_text("another")
        done = run_python("-m", "pdkit_connector.serve", *argv, code=3)
        assert "have changed since this stack was started" in done.stdout + done.stderr


MP = json.dumps({"kv_connector_module_path": serve.SERVER_CONNECTOR})


@pytest.mark.parametrize(
    ("argv", "steps"),
    [
        ((), []),
        (("--kv-transfer-config", "{}"), ["rows", "fixes"]),
        (("--kv-transfer-config", MP), ["rows"]),
    ],
)
def test_only_an_engine_with_a_connector_gets_an_identity_and_fixes(monkeypatch, argv, steps):
    taken = []
    monkeypatch.setattr(serve, "discover", list)
    monkeypatch.setattr(serve, "take_rows_early", lambda: taken.append("rows"))
    monkeypatch.setattr(serve.Registry, "apply", lambda *_: taken.append("fixes"))
    serve.check(argv)
    assert taken == steps


STEPS = """
import importlib, sys
from pdkit_connector import fork_server, serve

fork_server.preload = fork_server.start = lambda: None
compiler = "torch._inductor.lowering"
serve.fork_cores_on_cpus()
print(compiler in sys.modules, end=" ")
serve.check(())
print("lmcache" in sys.modules, end=" ")
serve.check(("--config", "none"))
print("lmcache" in sys.modules, end=" ")
print(bool(importlib.import_module(compiler).FALLBACK_ALLOW_LIST), end=" ")
names = list(sys.modules)
print(names.index("transformers.utils.import_utils") < names.index("importlib_metadata"))
"""


def test_each_step_imports_what_it_needs_and_in_the_order_that_is_quick():
    """LMCache is for engines that have a connector, and Transformers looks at packages first.

    The compiler is imported where something may be compiled, or later where it is asked for.
    """
    assert last_line(STEPS, TORCHDYNAMO_DISABLE="1") == "False False True True True"


ALONE = """
import sys, vllm.config
names = list(sys.modules)
print(names.index("transformers.utils.import_utils") < names.index("importlib_metadata"))
print("torch._inductor.lowering" in sys.modules)
"""


def test_vllm_alone_imports_the_compiler_and_in_the_slow_order():
    """What the test above would see if `serve` did nothing."""
    printed = run_python("-c", ALONE, TORCHDYNAMO_DISABLE="1").stdout
    assert printed.splitlines()[-2:] == ["False", "True"]


@pytest.mark.parametrize(("off", "hidden"), [("1", True), ("0", False)])
def test_the_compiler_is_hidden_only_where_nothing_is_compiled(monkeypatch, off, hidden):
    name = "torch._inductor.lowering"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", off)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with serve.without_inductor():
        assert (name in sys.modules) is hidden
    assert name not in sys.modules


@pytest.fixture
def started(monkeypatch):
    """Note what would be run as the server."""
    servers = []
    monkeypatch.setattr(serve, "fork_cores_on_cpus", lambda: None)
    monkeypatch.setattr(runpy, "run_module", lambda name, **_more: servers.append(name))
    monkeypatch.setattr(sys, "argv", ["serve"])
    return servers


def test_the_server_starts_if_every_fix_applies(monkeypatch, started):
    monkeypatch.setattr(serve, "check", lambda _argv: None)
    serve.main()
    assert started == ["vllm.entrypoints.openai.api_server"]


def test_the_logs_of_its_stack_are_bounded_before_it_serves(monkeypatch, started):
    monkeypatch.setattr(serve, "check", lambda _argv: None)
    monkeypatch.setattr(serve, "bound_logs", lambda: started.append("logs"))
    serve.main()
    assert started == ["logs", "vllm.entrypoints.openai.api_server"]


def test_no_other_process_can_take_its_socket_name_first(monkeypatch, started):
    """Its processes all have it: the fork server, too, which is started first."""
    seen = []
    monkeypatch.setattr(serve, "fork_cores_on_cpus", lambda: seen.append(engine_name()))
    monkeypatch.setattr(serve, "check", lambda _argv: None)
    monkeypatch.setattr(serve, "publish_counts", lambda: seen.append(engine_name()))
    for _ in range(2):
        monkeypatch.setenv(NAME_ENV, "pdkit-producer-0-8001")
        serve.main()
    first, same, second, _ = seen
    assert first == same != second
    assert all(len(name) >= len("pdkit-producer-0-8001-") + 16 for name in seen)


def test_nothing_starts_if_a_fix_does_not_apply(monkeypatch, started):
    def fail(_argv):
        raise FixFailed("fix B99 is needed")

    monkeypatch.setattr(serve, "check", fail)
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert (ended.value.code, started) == (3, [])


def test_nothing_starts_without_process_numbers(monkeypatch, started):
    def none_left():
        raise ConnectorError("process numbers end")

    monkeypatch.setattr(serve, "take_numbers", none_left)
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert (ended.value.code, started) == (3, [])


def test_a_broken_vllm_is_reported_as_such(monkeypatch, started):
    monkeypatch.setitem(sys.modules, "vllm.config", ModuleType("vllm.config"))
    with pytest.raises(ImportError, match="VllmConfig"):
        serve.main()
    assert not started


def test_spawned_processes_import_vllm_and_not_the_server(monkeypatch, tmp_path):
    """Each engine core imports the server's main module again."""
    monkeypatch.setattr(serve, "fork_cores_on_cpus", lambda: None)
    monkeypatch.setattr(serve, "check", lambda _argv: None)
    monkeypatch.setattr(serve, "_SERVER", "a_server")
    monkeypatch.setattr(sys, "argv", ["serve"])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_server.py").write_text(
        "import sys; sys.seen = __name__, sys.modules['__main__']"
    )
    before = sys.modules["__main__"]
    serve.main()
    assert sys.__dict__.pop("seen") == ("__main__", before)

    runpy.run_module("pdkit_connector.serve", run_name="__mp_main__")
    assert "vllm.config" in sys.modules
    assert gc.isenabled()


COMMIT = "a" * 40


class TestHeldToCommit:
    """A branch of a hub moves, and whoever starts next would load other weights."""

    @pytest.fixture
    def hub(self, monkeypatch, tmp_path):
        """Let a hub answer with a commit, or with an error."""
        asked = []

        def answer(what):
            def model_info(_, model, *, revision, timeout):
                asked.append((model, revision))
                if isinstance(what, Exception):
                    raise what
                return SimpleNamespace(sha=what)

            monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
            return asked

        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        return answer

    @pytest.mark.parametrize("given", [[], ["--revision", "v1"], ["--revision=v1"]])
    def test_a_hubs_model_is_held_to_the_commit_of_now(self, hub, given):
        asked = hub(COMMIT)
        argv = ["--model", "acme/one", *given]
        assert serve.held_to_commit(argv) == [*argv, "--revision", COMMIT]
        assert asked == [("acme/one", "v1" if given else None)]

    @pytest.mark.parametrize(
        "argv", [["--model", "/models/one"], ["--model", "acme/one", "--revision", COMMIT], []]
    )
    def test_what_cannot_move_is_not_looked_up(self, hub, argv):
        assert hub(COMMIT) == []
        assert serve.held_to_commit(argv) == argv

    def test_without_an_answer_it_is_the_cached_commit_which_vllm_loads(self, hub, tmp_path):
        hub(OSError("no network"))
        argv = ["--model", "acme/one"]
        assert serve.held_to_commit(argv) == argv, "nothing is cached: vLLM says what is wrong"
        refs = tmp_path / "models--acme--one" / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(COMMIT)
        assert serve.held_to_commit(argv) == [*argv, "--revision", COMMIT]

    def test_two_commits_of_one_branch_have_two_identities(self, hub, monkeypatch):
        monkeypatch.delenv(DIGEST_VARIABLE, raising=False)
        rows = []
        for commit in (COMMIT, "b" * 40):
            hub(commit)
            _, revision = serve.held_to_commit(["--model", "acme/one"])[-2:]
            model = SimpleNamespace(model="acme/one", revision=revision)
            rows.append(ROWS["model"].take(SimpleNamespace(model_config=model)))
        assert rows[0] != rows[1]
