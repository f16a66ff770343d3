"""`deploy export kubernetes` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Ended


def test_export_prints_the_next_commands(deploy_here: Callable[..., Ended], tmp_path: Path) -> None:
    argv = ("export", "kubernetes", "--vendor", "cuda", "--gpus", "4", "-o", "out dir")
    ended = deploy_here(*argv, cwd=tmp_path, home=tmp_path / "home")
    assert (ended.code, ended.stderr) == (0, "")
    assert "overlays/cuda: 4 redis, 2 producer, 2 consumer, 2 router" in ended.stdout
    assert "kubectl apply -k 'out dir'/overlays/cuda" in ended.stdout
    assert (tmp_path / "out dir" / "overlays" / "cuda" / "kustomization.yaml").is_file()
    again = deploy_here(*argv, "--json", cwd=tmp_path, home=tmp_path / "home")
    data = json.loads(again.stdout)["data"]
    assert data["pods"] == {"cuda": {"redis": 4, "producer": 2, "consumer": 2, "router": 2}}
    assert data["then"][1].startswith("kubectl -n pdkit create secret generic pdkit ")


def test_a_hint_is_the_command_as_typed(deploy_here: Callable[..., Ended], tmp_path: Path) -> None:
    argv = ("export", "kubernetes", "--vendor", "rocm", "--gpus", "1", "-o", "out")
    ended = deploy_here(*argv, cwd=tmp_path, home=tmp_path / "home")
    assert ended.code == 2
    assert "try: deploy export kubernetes --vendor rocm -o out --gpus 2" in ended.stderr
    assert not (tmp_path / "out").exists()
