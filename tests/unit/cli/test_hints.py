"""Errors in the words of the command line that met them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from deploy.cli.hints import fitted_hint, naming_origins, not_a_number
from deploy.cli.options import stack_option_names
from deploy.config.spec import StackSpec
from deploy.errors import HELP, NO_OPTION, ConfigError, MissingGpus, NamedSetting

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
    def test_the_typed_options_stay_in_the_hint(self, typed: str, hint: str) -> None:
        words = typed.split()
        assert fitted_hint(MissingGpus("few", retry=GPUS), words, words[0]) == hint

    def test_words_with_spaces_stay_quoted(self) -> None:
        typed = ["up", "--model", "./my model", "--gpus", "9"]
        hint = fitted_hint(MissingGpus("few", retry=GPUS), typed, "up")
        assert hint == "deploy up --model './my model' --gpus 8"

    def test_several_alternatives_are_separate_commands(self) -> None:
        error = MissingGpus("few", retry=({"--tp": "1"}, {"--gpus": "4"}), hint="buy more")
        assert error.hint == "deploy plan --tp 1, or deploy plan --gpus 4, or buy more"
        hint = fitted_hint(error, ["up", "--tp", "2"], "up")
        assert hint == "deploy up --tp 1, or deploy up --tp 2 --gpus 4, or buy more"

    def test_a_command_without_these_options_keeps_the_hint(self) -> None:
        error = MissingGpus("few", retry=GPUS)
        assert fitted_hint(error, ["swap", "rocm"], "swap") == error.hint


class TestCommands:
    @pytest.mark.parametrize("command", ["up", "render", "plan", "status", "check"])
    def test_the_help_of_the_typed_command_is_named(self, command: str) -> None:
        error = ConfigError("bad", hint=HELP)
        assert fitted_hint(error, [command], command) == f"deploy {command} --help"

    def test_other_commands_stay(self) -> None:
        error = ConfigError("bad", hint="deploy plan --inventory FILE", retry=({"--tp": "2"},))
        hint = fitted_hint(error, ["up"], "up")
        assert hint == "deploy up --tp 2, or deploy plan --inventory FILE"

    def test_a_note_follows_the_commands(self) -> None:
        error = ConfigError("bad", retry=({"--tp": "2"},), note="without x", hint="buy more")
        assert error.hint == "deploy plan --tp 2, without x, or buy more"
        assert error.hint_for("up") == "deploy up --tp 2, without x, or buy more"


class TestOrigins:
    ORIGINS: ClassVar = {
        "tp": "deploy.yaml", "gpus": "--gpus", "topology": "PDKIT_TOPOLOGY", "bind": "--bind",
        "api_key_file": "--api-key-file", "redis": "deploy.yaml", "vendor": "my.yaml",
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (ConfigError("3 does not", setting="tp"), "deploy.yaml: tp: 3 does not"),
            (
                ConfigError(
                    (NamedSetting("gpus"), " 3 contradicts ", NamedSetting("topology"), " 2p2d")
                ),
                "--gpus 3 contradicts PDKIT_TOPOLOGY 2p2d",
            ),
            (ConfigError((NamedSetting("tp"), " 3 contradicts")), "deploy.yaml: tp 3 contradicts"),
            (ConfigError(("for ", NamedSetting("vendor"), " cuda asked")), "for vendor cuda asked"),
            (ConfigError("/x is empty", setting="api_key_file"), "--api-key-file: /x is empty"),
            (ConfigError("'x' is", setting="redis.image"), "deploy.yaml: redis.image: 'x' is"),
            (ConfigError("redis: /no/server"), "redis: /no/server"),
            (ConfigError("x is no folder", setting="model"), "--model: x is no folder"),
            (ConfigError("--tp and tp: stay"), "--tp and tp: stay"),
        ],
    )
    def test_settings_are_called_what_the_user_called_them(
        self, error: ConfigError, said: str
    ) -> None:
        error.name_origins(self.ORIGINS)
        assert error.message == said

    def test_the_reason_names_no_setting(self) -> None:
        error = ConfigError(("3 contradicts ", NamedSetting("gpus")), setting="tp")
        assert (error.setting, error.reason) == ("tp", "3 contradicts --gpus")

    def test_every_error_names_the_origin_of_its_setting(self) -> None:
        with pytest.raises(MissingGpus) as caught, naming_origins(self.ORIGINS):
            raise MissingGpus("none", setting="tp", hint="--tp 2", details=("seen",))
        assert caught.value.message == "deploy.yaml: tp: none"
        assert (caught.value.hint, caught.value.details) == ("--tp 2", ("seen",))

    def test_a_setting_without_an_origin_is_named_after_its_option(self) -> None:
        fields = StackSpec.model_fields
        nested = {
            name
            for name, field in fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        }
        assert fields.keys() - set(stack_option_names()) - nested == NO_OPTION
        assert ConfigError("x", setting="api_key_file").message == "--api-key-file: x"
        assert ConfigError("x", setting="hub_cache").message == "hub_cache: x"
        assert ConfigError("x", setting="redis.shards").message == "redis.shards: x"


class BadParameter(Exception):
    def __init__(self, kind: str, *options: str, param: object = None) -> None:
        kinds = SimpleNamespace(name=kind)
        self.param = param or SimpleNamespace(type=kinds, opts=list(options))


class TestNumbers:
    """Typer's words differ by its release, and only some tell the value."""

    @pytest.mark.parametrize("kind", ["integer", "integer range"])
    @pytest.mark.parametrize("typed", [["--gpus", "four"], ["--gpus=four"]])
    def test_invalid_numbers_are_named_with_their_option(self, kind: str, typed: list[str]) -> None:
        said = not_a_number(BadParameter(kind, "--gpus"), ["plan", *typed, "--tp", "2"])
        assert said == "invalid value 'four' for '--gpus': expected a whole number"

    def test_both_names_of_an_option_are_shown(self) -> None:
        said = not_a_number(BadParameter("integer", "-n", "--lines"), ["logs", "-n", "x"])
        assert said.startswith("invalid value 'x' for '-n' / '--lines':")

    def test_both_kinds_of_typer_errors_are_read(self) -> None:
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(int).validate_python("x")
        wrong = BadParameter("", param=SimpleNamespace(opts=["-n"]))
        wrong.__cause__ = caught.value
        assert not_a_number(wrong, ["logs", "-n", "x"]).startswith("invalid value 'x' for '-n':")

    def test_other_errors_are_left_to_typer(self) -> None:
        assert not_a_number(BadParameter("integer range", "-n"), ["logs", "-n", "-1"]) == ""
        assert not_a_number(BadParameter("text", "-n"), ["logs", "-n", "x"]) == ""
        assert not_a_number(ValueError("no such option"), []) == ""
