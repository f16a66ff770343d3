"""Where a spec's values come from, which source wins, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.config.sources import ENV_FIELDS, SpecSource, load_spec
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(
    text: str | None = None, environ: dict[str, str] | None = None, **flags: Any
) -> SpecSource:
    """Load from a deploy.yaml of that text, an environment and flags."""
    if text is not None:
        Path("deploy.yaml").write_text(text, encoding="utf-8")
    return load_spec(flags, environ or {})


def refusal(
    text: str | None = None, environ: dict[str, str] | None = None, **flags: Any
) -> ConfigError:
    """Return the error that loading raises."""
    with pytest.raises(ConfigError) as caught:
        load(text, environ, **flags)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2
    return caught.value


class TestPrecedence:
    def test_defaults_apply_if_nothing_is_given(self) -> None:
        source = load()
        assert source.spec == StackSpec()
        assert source.origins == {}
        assert source.file is None

    def test_flags_win_over_environment_over_file_over_defaults(self) -> None:
        text = "port: 9001\nname: from-file\ntp: 2\n"
        source = load(text, {"PDKIT_PORT": "9002", "PDKIT_NAME": "from-env"}, port=9003)
        spec = source.spec
        assert (spec.port, spec.name, spec.tp, spec.bind) == (9003, "from-env", 2, "127.0.0.1")
        assert source.origins == {"port": "--port", "name": "PDKIT_NAME", "tp": "deploy.yaml"}
        assert source.file == Path("deploy.yaml")

    def test_a_flag_that_is_not_given_sets_nothing(self) -> None:
        assert load("port: 9001", port=None, layerwise=None).spec.port == 9001

    def test_a_no_flag_sets_false(self) -> None:
        assert load("layerwise: true", layerwise=False).spec.layerwise is False

    def test_an_empty_variable_sets_nothing(self) -> None:
        assert load("port: 9001", {"PDKIT_PORT": ""}).spec.port == 9001

    def test_a_named_file_replaces_the_found_one(self, tmp_path: Path) -> None:
        (tmp_path / "deploy.yaml").write_text("port: 9001")
        other = tmp_path / "other.yaml"
        other.write_text("port: 9002")
        source = load_spec({}, {}, other)
        assert source.spec.port == 9002
        assert source.origins == {"port": str(other)}

    @pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
    def test_an_empty_file_is_the_defaults(self, text: str) -> None:
        assert load(text).spec == StackSpec()

    def test_every_variable_is_a_field(self) -> None:
        assert set(ENV_FIELDS) <= set(StackSpec.model_fields)

    @pytest.mark.parametrize(
        ("variable", "field", "value"),
        [("PDKIT_GPUS", "gpus", 4), ("PDKIT_LAYERWISE", "layerwise", True), ("PDKIT_TP", "tp", 2)],
    )
    def test_variables_are_read_by_type(self, variable: str, field: str, value: object) -> None:
        assert getattr(load(None, {variable: str(value).lower()}).spec, field) == value


class TestSplitOfTwoSources:
    """A split of a stronger source replaces a weaker one's, rather than contradict it."""

    def test_the_gpus_flag_wins_over_the_files_topology(self) -> None:
        source = load("topology: 1p1d\n", gpus=4)
        assert (source.spec.gpus, source.spec.topology) == (4, None)
        assert source.origins == {"gpus": "--gpus"}

    def test_the_topology_flag_wins_over_the_files_gpus(self) -> None:
        spec = load("gpus: 4\n", topology="1p1d").spec
        assert (spec.gpus, spec.topology) == (None, "1p1d")

    def test_a_variable_wins_over_the_files_counts(self) -> None:
        spec = load("producers: 2\nconsumers: 2\n", {"PDKIT_TOPOLOGY": "1p3d"}).spec
        assert (spec.producers, spec.consumers, spec.topology) == (None, None, "1p3d")

    def test_a_flag_wins_over_a_variable(self) -> None:
        spec = load(None, {"PDKIT_TOPOLOGY": "1p3d"}, gpus=2).spec
        assert (spec.gpus, spec.topology) == (2, None)

    def test_two_forms_of_one_source_both_stay(self) -> None:
        spec = load("gpus: 4\ntopology: 1p1d\n").spec
        assert (spec.gpus, spec.topology) == (4, "1p1d"), "the planner says they contradict"

    def test_other_fields_of_the_weaker_source_stay(self) -> None:
        assert load("topology: 1p1d\nport: 9001\n", gpus=4).spec.port == 9001


class TestRefusals:
    """Each names field, value and origin in one line."""

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ({"gpus": 0}, ["--gpus", "0", "at least 1"]),
            ({"port": 80}, ["--port", "80", "1024"]),
            ({"vendor": "nvidia"}, ["--vendor", "'nvidia'", "'cpu'"]),
            ({"topology": "1x2"}, ["--topology", "'1x2'", "1p3d"]),
            ({"name": "a/b"}, ["--name", "'a/b'", "letters"]),
            ({"connector": "nixl"}, ["--connector", "'nixl'", "'lmcache'"]),
            ({"save_decode_cache": "maybe"}, ["--save-decode-cache", "'maybe'"]),
        ],
    )
    def test_an_invalid_flag_is_named(self, flags: dict[str, Any], words: list[str]) -> None:
        message = refusal(**flags).message
        assert all(word in message for word in words), message

    @pytest.mark.parametrize(
        ("environ", "words"),
        [
            ({"PDKIT_GPUS": "four"}, ["PDKIT_GPUS", "'four'", "whole number"]),
            ({"PDKIT_TOPOLOGY": "2"}, ["PDKIT_TOPOLOGY", "'2'", "1p3d"]),
            ({"PDKIT_LAYERWISE": "perhaps"}, ["PDKIT_LAYERWISE", "'perhaps'"]),
        ],
    )
    def test_an_invalid_variable_is_named(self, environ: dict[str, str], words: list[str]) -> None:
        message = refusal(environ=environ).message
        assert all(word in message for word in words), message

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("gpus: 0", ["deploy.yaml", "gpus", "0"]),
            ("port: http", ["deploy.yaml", "port", "'http'"]),
            ("engine: {block_size: 0}", ["deploy.yaml", "engine.block_size", "0"]),
            ("lmcache:\n  chunk_size: big\n", ["deploy.yaml", "lmcache.chunk_size", "'big'"]),
            ("engine: {env: {A: 1}}", ["deploy.yaml", "engine.env.A", "1"]),
            ("redis: []", ["deploy.yaml", "redis"]),
            ("timeouts: {ready_s: .nan}", ["deploy.yaml", "timeouts.ready_s", "nan"]),
            ("engine: {1: 2}", ["deploy.yaml", "engine"]),
            ("producer_tp: 2", ["deploy.yaml", "producer_tp is no longer a setting", "tp is"]),
            ("consumer_tp: 1", ["deploy.yaml", "consumer_tp is no longer a setting", "tp is"]),
        ],
    )
    def test_an_invalid_file_setting_is_named(self, text: str, words: list[str]) -> None:
        message = refusal(text).message
        assert all(word in message for word in words), message

    def test_the_error_names_the_source_of_the_value(self) -> None:
        assert "PDKIT_PORT" in refusal("port: 9001", {"PDKIT_PORT": "1"}).message
        assert "deploy.yaml" in refusal("port: 1", {"PDKIT_NAME": "ok"}).message

    @pytest.mark.parametrize(
        ("text", "unknown", "near"),
        [
            ("topolgy: 1p1d", "topolgy", "topology"),
            ("gpu: 4", "gpu", "gpus"),
            ("lmcache: {chunk_sise: 256}", "lmcache.chunk_sise", "chunk_size"),
            ("engine: {blocksize: 16}", "engine.blocksize", "block_size"),
            ("timeouts: {ready: 5}", "timeouts.ready", "ready_s"),
        ],
    )
    def test_an_unknown_key_suggests_the_nearest(self, text: str, unknown: str, near: str) -> None:
        message = refusal(text).message
        assert f"'{unknown}'" in message
        assert f"did you mean '{near}'?" in message
        assert "deploy.yaml" in message

    def test_a_key_unlike_any_lists_all_keys(self) -> None:
        message = refusal("redis: {zzz: 1}").message
        assert "server, memory_gib" in message
        assert "did you mean" not in message

    @pytest.mark.parametrize(
        ("text", "line"),
        [("name: a\nengine: {\n", 3), ("name: 'a\n", 2), ("a: 1\nb: 2\n\tc: 3\n", 3)],
    )
    def test_broken_yaml_names_the_line(self, text: str, line: int) -> None:
        message = refusal(text).message
        assert "deploy.yaml" in message
        assert f"line {line}" in message

    def test_a_file_that_is_not_text(self) -> None:
        Path("deploy.yaml").write_bytes(b"\xff\xfe\x00name")
        assert "deploy.yaml" in refusal().message

    @pytest.mark.parametrize(
        "text",
        [
            "name: " + "[" * 5000,
            "name: " + "{a: " * 5000 + "1" + "}" * 5000,
            "gpus: " + "9" * 5000,
            "gpus: " + ":".join(["59"] * 5000),
            "name: 2001-13-45",
            "name: 2001-12-14T61:59:43Z",
        ],
        ids=["lists", "mappings", "number", "number by sixties", "day", "time"],
    )
    def test_absurd_values_give_a_short_error(self, text: str) -> None:
        assert len(refusal(text).message) < 300

    @pytest.mark.parametrize("text", ["name: {}", "engine: {{env: {{A: {}}}}}", "vendor: {}"])
    def test_a_billion_laughs_file_is_refused(self, text: str) -> None:
        """Ten levels, each ten times the one below: written out, it takes hours and all memory."""
        levels = ["[&a0 [w, w, w, w, w, w, w, w, w, w]"]
        levels += [f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
        assert len(refusal(text.format(", ".join(levels) + "]")).message) < 2000

    def test_a_file_may_not_build_objects(self) -> None:
        assert "not valid YAML" in refusal("name: !!python/object/apply:os.getcwd []").message

    @pytest.mark.parametrize(
        ("text", "kind"), [("- a\n- b\n", "list"), ("hello", "str"), ("5", "int")]
    )
    def test_a_file_without_a_mapping(self, text: str, kind: str) -> None:
        message = refusal(text).message
        assert "mapping" in message
        assert kind in message

    def test_a_named_file_that_is_missing(self) -> None:
        with pytest.raises(ConfigError, match=r"none\.yaml") as caught:
            load_spec({}, {}, Path("none.yaml"))
        assert "-f" in caught.value.hint

    def test_a_named_file_that_is_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            load_spec({}, {}, tmp_path)


class TestOwnWords:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("engine: []", "expected a mapping with the keys python, dtype"),
            ("engine: {args: x}", "expected a list, such as [a, b]"),
            ("engine: {env: [1]}", "expected a mapping, such as {NAME: value}"),
            ("engine: {env: {A: 1}}", 'expected a string; quote it: "1"'),
            ("engine: {env: {A: true}}", 'quote it: "true"'),
            ("redis: {memory_gib: lots}", "expected a number"),
            ("layerwise: perhaps", "expected true or false"),
            ("gpus: 2.5", "expected a whole number"),
            ("gpus: 99", "expected at most 64"),
            ("redis: {memory_gib: 0}", "expected more than 0"),
        ],
    )
    def test_errors_say_what_is_expected(self, text: str, words: str) -> None:
        message = refusal(text).message
        assert words in message
        assert "instance of" not in message
        assert "valid tuple" not in message

    @pytest.mark.parametrize(
        ("value", "meant"),
        [("nvidia", "cuda"), ("CUDA", "cuda"), ("amd", "rocm"), ("ROCm", "rocm"), ("cpus", "cpu")],
    )
    def test_a_vendor_by_another_name(self, value: str, meant: str) -> None:
        assert f"did you mean '{meant}'?" in refusal(f"vendor: {value}").message

    def test_an_unknown_vendor(self) -> None:
        assert "did you mean" not in refusal("vendor: abacus").message


class TestTwice:
    """YAML itself takes the later of two equal keys, and says nothing."""

    @pytest.mark.parametrize(
        ("text", "key", "lines"),
        [
            ("tp: 1\nport: 9000\ntp: 2\n", "tp", "lines 1 and 3"),
            ("redis:\n  image: a:1\n  image: b:1\n", "image", "lines 2 and 3"),
            ("redis: {image: a:1, image: b:1}\n", "image", "line 1"),
            ("tp: 1\n'tp': 2\n", "tp", "lines 1 and 2"),
        ],
    )
    def test_a_duplicate_key_is_refused_with_both_lines(
        self, text: str, key: str, lines: str
    ) -> None:
        error = refusal(text)
        assert f"deploy.yaml: duplicate key '{key}'" in error.message
        assert lines in error.message

    def test_the_same_key_in_two_mappings_is_allowed(self) -> None:
        Path("deploy.yaml").write_text("redis: {image: 'a:1'}\nrouter: {image: 'a:1'}\n")
        assert load_spec({}, {}).spec.redis.image == "a:1"

    def test_a_merged_key_may_be_overridden(self) -> None:
        Path("deploy.yaml").write_text(
            "lmcache: &one {chunk_size: 512}\nredis: {}\nengine: {env: {}}\n"
        )
        assert load_spec({}, {}).spec.lmcache.chunk_size == 512


def test_a_count_on_the_command_line_keeps_the_other_count_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text("producers: 2\nconsumers: 2\ngpus: 4\n")
    spec = load_spec({"consumers": 3}, {}, file).spec
    assert (spec.producers, spec.consumers, spec.gpus) == (2, 3, None)
