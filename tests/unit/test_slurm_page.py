"""The script of the page on Slurm, run as two tasks with stand-ins for what a cluster has."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config.spec import StackSpec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "slurm.md"
JOB = "4711"
# Both tasks run in full, one after the other, so that the second one finds what it waits for.
SRUN = """\
[ "$1" = --kill-on-bad-exit=1 ] || exit 2
shift
for number in 0 1; do
    ADDRESS=10.0.0.$((5 + number)) SLURM_PROCID=$number "$@" || exit
done
"""
DEPLOY = """\
printf '%s\\n' "$*" >> "$SLURM_SUBMIT_DIR/typed-$SLURM_PROCID"
[ "$1" != up ] || cp "$3" "$SLURM_SUBMIT_DIR/spec-$SLURM_PROCID"
"""
STAND_INS = {
    "srun": SRUN,
    "hostname": 'echo "$ADDRESS fe80::1"',
    "venv/bin/deploy": DEPLOY,
    "venv/bin/redis-server": 'cat > "$SLURM_SUBMIT_DIR/redis.conf"',
    "venv/bin/openssl": "echo 0123456789abcdef",
    "venv/bin/sleep": '[ "$1" = infinity ] || exec /bin/sleep "$1"',
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the submission folder after the job has run."""
    folder = tmp_path_factory.mktemp("job")
    (script,) = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    # The page's own folder of a job is one of the whole machine.
    assert "PDKIT_HOME=/tmp/pdkit-$SLURM_JOB_ID" in script
    script = script.replace("/tmp/pdkit-", f"{folder}/home-$SLURM_PROCID-")
    stand_ins = {name: f"#!/bin/bash\n{text}\n" for name, text in STAND_INS.items()}
    for name, text in {"pdkit.sbatch": script, **stand_ins}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": JOB}
    subprocess.run(
        folder / "pdkit.sbatch",
        env={**env, "SLURM_SUBMIT_DIR": str(folder)},
        check=True,
        capture_output=True,  # by which this ends no sooner than the stand-in of Redis
        timeout=60,
    )
    return folder


def spec(job: Path, task: int) -> StackSpec:
    return StackSpec.model_validate(yaml.safe_load((job / f"spec-{task}").read_text()))


def test_the_parts_are_one_stack(job: Path) -> None:
    engines, front = spec(job, 0), spec(job, 1)
    assert (engines.producers, engines.consumers) == (4, 0)
    assert (front.producers, front.consumers) == (0, 4)
    assert engines.engine.bind == "10.0.0.5"
    assert [str(one.url) for one in front.router.engines] == [
        f"http://10.0.0.5:{port}" for port in range(8010, 8014)
    ]
    for same in ("name", "model", "vendor", "runtime", "redis"):
        assert getattr(engines, same) == getattr(front, same)
    assert engines.engine.key_file == front.engine.key_file


def test_each_part_is_started_and_stopped(job: Path) -> None:
    for task in (0, 1):
        up, down = (job / f"typed-{task}").read_text().splitlines()
        assert up.startswith("up -f ")
        assert down == f"down --name job-{JOB}"


def test_redis_has_a_password_that_no_other_user_reads(job: Path) -> None:
    url = job / f"job-{JOB}" / "redis-url"
    assert url.read_text() == "redis://:0123456789abcdef@10.0.0.5:6379\n"
    assert url.stat().st_mode & 0o077 == 0
    settings: dict[str, Any] = dict(
        line.split(" ", 1) for line in (job / "redis.conf").read_text().splitlines()
    )
    assert settings["bind"] == "10.0.0.5"
    assert settings["requirepass"] == "0123456789abcdef"
    assert settings["maxmemory-policy"] == "allkeys-lru"
