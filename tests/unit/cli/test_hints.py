"""Errors in the words of the command line that met them."""

from __future__ import annotations

from typing import ClassVar

import pytest

from deploy.cli.hints import fitted_hint, in_own_words, named_by_origin, naming_origins
from deploy.errors import ConfigError, MissingGpus

GPUS = ({"--topology": None, "--gpus": "8"},)


class TestRetry:
    @pytest.mark.parametrize(
        ("typed", "hint"),
        [
            ("plan --inventory i.yaml --topology 2p2d --tp 4",
             "deploy plan --inventory i.yaml --tp 4 --gpus 8"),
            ("render --topology=2p2d -o out", "deploy render -o out --gpus 8"),
            ("up --gpus 9 --json", "deploy up --gpus 8"),
        ],
    )  # fmt: skip
    def test_what_was_typed_is_kept(self, typed: str, hint: str) -> None:
        words = typed.split()
        assert fitted_hint(MissingGpus("few", retry=GPUS), words, words[0]) == hint

    def test_words_with_spaces_stay_quoted(self) -> None:
        typed = ["up", "--model", "./my model", "--gpus", "9"]
        hint = fitted_hint(MissingGpus("few", retry=GPUS), typed, "up")
        assert hint == "deploy up --model './my model' --gpus 8"

    def test_several_ways_and_another(self) -> None:
        error = MissingGpus("few", retry=({"--tp": "1"}, {"--gpus": "4"}), hint="buy more")
        assert error.hint == "deploy plan --tp 1, or deploy plan --gpus 4, or buy more"
        hint = fitted_hint(error, ["up", "--tp", "2"], "up")
        assert hint == "deploy up --tp 1, or deploy up --tp 2 --gpus 4, or buy more"

    def test_a_command_without_these_options_keeps_the_hint(self) -> None:
        error = MissingGpus("few", retry=GPUS)
        assert fitted_hint(error, ["swap", "rocm"], "swap") == error.hint


class TestCommands:
    @pytest.mark.parametrize("command", ["up", "render", "plan", "status", "check"])
    def test_help_of_the_command_that_was_typed(self, command: str) -> None:
        error = ConfigError("bad", hint="deploy plan --help")
        assert fitted_hint(error, [command], command) == f"deploy {command} --help"

    def test_only_plans_take_an_inventory(self) -> None:
        error = ConfigError("bad", hint="deploy plan --inventory FILE, or deploy plan --tp 2")
        hint = fitted_hint(error, ["up"], "up")
        assert hint == "deploy plan --inventory FILE, or deploy up --tp 2"


class TestOrigins:
    ORIGINS: ClassVar = {
        "tp": "deploy.yaml", "gpus": "--gpus", "topology": "PDKIT_TOPOLOGY", "bind": "--bind",
        "api_key_file": "--api-key-file", "redis": "deploy.yaml", "vendor": "my.yaml",
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("message", "said"),
        [
            ("--tp: 3 does not", "deploy.yaml: tp: 3 does not"),
            ("--gpus 3 contradicts --topology 2p2d", "--gpus 3 contradicts PDKIT_TOPOLOGY 2p2d"),
            ("2 GPUs for --vendor cuda asked for", "2 GPUs for vendor cuda asked for"),
            ("api_key_file: /x is empty", "--api-key-file: /x is empty"),
            ("redis.image: 'x' is", "deploy.yaml: redis.image: 'x' is"),
            ("redis: /no/server cannot be started", "redis: /no/server cannot be started"),
            ("--model: x is no folder", "--model: x is no folder"),
            ("engine.args: '--tpx' is the plan's", "engine.args: '--tpx' is the plan's"),
            ("tp is good. bind: too", "tp is good. bind: too"),
        ],
    )
    def test_settings_are_called_what_the_user_called_them(self, message: str, said: str) -> None:
        assert named_by_origin(message, self.ORIGINS) == said

    def test_of_any_error_of_ours(self) -> None:
        with pytest.raises(MissingGpus) as caught, naming_origins(self.ORIGINS):
            raise MissingGpus("--tp: none", hint="--tp 2", details=("seen",))
        assert caught.value.message == "deploy.yaml: tp: none"
        assert (caught.value.hint, caught.value.details) == ("--tp 2", ("seen",))


class TestNumbers:
    """Typer's words differ by its release, and only some tell the value."""

    @pytest.mark.parametrize(
        "line",
        [
            "Invalid value for '--gpus': Input should be a valid integer, unable to parse it",
            "Invalid value for '--gpus': 'four' is not a valid integer.",
            "Invalid value for '--gpus': 'four' is not a valid integer range.",
        ],
    )
    @pytest.mark.parametrize("typed", [["--gpus", "four"], ["--gpus=four"]])
    def test_what_is_no_number(self, line: str, typed: list[str]) -> None:
        said = in_own_words(line, ["plan", *typed, "--tp", "2"])
        assert said == "invalid value 'four' for '--gpus': expected a whole number"

    def test_of_an_option_with_two_names(self) -> None:
        line = "Invalid value for '-n' / '--lines': Input should be a valid integer"
        assert in_own_words(line, ["logs", "-n", "x"]).startswith("invalid value 'x' for '-n' /")

    def test_other_lines_stay(self) -> None:
        assert in_own_words("No such option: --gpu", []) == "No such option: --gpu"
