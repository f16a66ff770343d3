"""vLLM's second model runner, whole, on this machine's CPU: what it does when a load fails.

A real engine of the installed vLLM with the tiny model; Triton's interpreter runs its kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.tiny_model.model_folder import ensure_tiny_model
from tests.conftest import REPO
from tests.wheels import cache_folder, unpacked

Answer = Callable[[str, str], dict[str, Any]]
TRITON = Path(__file__).with_name("second_runner.txt")


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    model = ensure_tiny_model(tmp_path_factory.mktemp("models"))
    triton = unpacked(
        TRITON.read_text(encoding="utf-8"), cache_folder() / "triton",
        without="triton/backends/nvidia/bin/*",
    )  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environ |= {"PYTHONPATH": str(triton), "OMP_NUM_THREADS": "1"}

    command = (sys.executable, "-m", "tests.gpu.second_runner", str(model))
    done = subprocess.run(
        command, cwd=REPO, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, dict[str, Any]] = json.loads(done.stdout)

    def answered(runner: str, loads: str) -> dict[str, Any]:
        said = answers[f"{runner} {loads}"]
        assert said.get("second_runner") is (runner == "2"), (said, done.stderr[-4000:])
        return said

    return answered


def test_both_runners_give_the_same_answer(answer: Answer) -> None:
    assert answer("2", "none")["tokens"] == answer("1", "none")["tokens"]


def test_the_first_runner_computes_what_failed_to_load(answer: Answer) -> None:
    assert answer("1", "failing")["tokens"] == answer("1", "none")["tokens"]


def test_the_second_runner_answers_wrong_after_a_failed_load(answer: Answer) -> None:
    """The reason for the first pin of the vendor table; where this fails, the pin can go."""
    assert answer("2", "failing")["tokens"] != answer("1", "none")["tokens"]
