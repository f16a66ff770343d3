"""Bad input, as a user types it: one line that says what, one that says what to do, no traces.

Every case runs as text and with `--json` in this process, and a few in one of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Ended
from tests.ports import free_row, taken


@dataclass(frozen=True)
class Case:
    """A command line, and what must be said of it.

    Attributes:
        files: written into the folder where it runs; FOLDER in a text stands for its path.
        state: text of the state file of the stack 'pdkit'.
    """

    arguments: tuple[str, ...]
    exit_code: int
    words: tuple[str, ...]
    hint: str
    code: str = "config"
    files: dict[str, str] = field(default_factory=dict)
    state: str | None = None


def up(arguments: str, exit_code: int, *words: str, hint: str, **more: object) -> Case:
    return Case(("up", *arguments.split()), exit_code, words, hint, **more)  # type: ignore[arg-type]


def compose(arguments: str, exit_code: int, *words: str, hint: str, **more: object) -> Case:
    """Render for containers, on hardware that need not be here."""
    auto = () if "--vendor" in arguments else ("--vendor", "auto")
    argv = ("render", "--runtime", "compose", *auto, *arguments.split())
    return Case(argv, exit_code, words, hint, **more)  # type: ignore[arg-type]


TWO_GPUS = "cpus: 8\nmemory_mib: 65536\ngpus: {vendor: rocm, count: 2, memory_mib: 65536}\n"
# An interpreter that has all modules, and says so of these versions.
OTHER_VERSIONS = """#!/bin/sh
case $2 in *PackageNotFoundError*) echo '["0.33.0", "0.5.6"]' ;; esac
"""


def bench(arguments: str, *words: str, hint: str = "deploy bench") -> Case:
    """Load a stack that is not there: what is wrong with the options is said first."""
    return Case(("bench", *arguments.split()), 2, words, hint, code="usage")


CASES: dict[str, Case] = {
    "bench: unknown workload": bench("--workload chat", "--workload chat", "multi-turn"),
    "bench: no tokens": bench("--input-tokens 0", "--input-tokens 0", "above 0"),
    "bench: rate of zero": bench("--rate 0", "--rate 0", "above 0"),
    "bench: negative rate": bench("--rate -2", "--rate -2", "above 0"),
    "bench: no speed": bench("--workload trace --speed nan", "--speed nan", "above 0"),
    "bench: unknown key of an SLO": bench("--slo tpot=1s", "--slo tpot=1s", "ttft, itl, e2e"),
    "bench: unknown unit of an SLO": bench("--slo itl=5us", "unknown unit 'us' of itl", "s, ms"),
    "bench: an SLO of nothing": bench("--slo=", "'' is not KEY=NUMBER and a unit"),
    "bench: a sweep with an SLO of nothing": bench("sweep --gpus 2 --slo=", "'' is not KEY=NUMBER"),
    "bench: compare nothing": bench("compare one two", "one/result.json", "No such file"),
    "bench: report of nothing": bench("report one", "one/result.json", "No such file"),
    "bench: search without an SLO": bench("--find-rate", "--find-rate", "SLO", hint="--slo"),
    "bench: two kinds of loop": bench(
        "--rate 1 --concurrency 2", "--rate and --concurrency", hint="leave out"
    ),
    "bench: search in a closed loop": bench(
        "--find-rate --slo ttft=1s --concurrency 2", "--find-rate and --concurrency",
        hint="leave out",
    ),
    "bench: repeats by noise and by number": bench(
        "--within 5 --repeats 9", "--within and --repeats", hint="--within 5"
    ),
    "bench: rounds by noise and by number": bench(
        "sweep --within 5 --rounds 9 --gpus 2", "--within and --rounds", hint="--within 5"
    ),
    "bench: a sweep at a rate of zero": bench(
        "sweep --gpus 2 --slo ttft=1s --rate 0", "--rate 0", "above 0"
    ),
    "bench: a sweep with an unknown key of an SLO": bench(
        "sweep --gpus 2 --slo tpot=1s", "--slo tpot=1s", "ttft, itl, e2e"
    ),
    "bench: a sweep with an unknown unit of an SLO": bench(
        "sweep --gpus 2 --slo itl=5us", "unknown unit 'us' of itl", "s, ms"
    ),
    "bench: a sweep that searches in a closed loop": bench(
        "sweep --gpus 2 --slo ttft=1s --concurrency 2", "--slo and --concurrency", hint="leave out"
    ),
    "bench: a sweep that searches for nothing": bench(
        "sweep --gpus 2 --rate 2", "--rate", "needs an SLO", hint="--slo"
    ),
    "bench: a sweep without its file": bench(
        "sweep --workload trace --gpus 2", "--workload trace needs a file", hint="--dataset"
    ),
    "bench: a sweep of a file that is not there": bench(
        "sweep --workload trace --dataset none --gpus 2", "none: No such file", hint="JSONL"
    ),
    "bench: a sweep of broken lines": Case(
        ("bench", "sweep", "--workload", "dataset", "--dataset", "some.jsonl", "--gpus", "2"), 2,
        ("some.jsonl: 1 of 2 lines cannot be used: line 2: not JSON",), "--skip-broken", "usage",
        files={"some.jsonl": '{"prompt": "a"}\n{\n'},
    ),
    "bench: a search by noise": bench(
        "--find-rate --slo ttft=1s --within 5", "--find-rate has no repeats", hint="--within"
    ),
    "bench: no such stack": Case(("bench",), 2, ("no stack 'pdkit'",), "deploy up", "state"),
    "no engines": up("--gpus 0", 2, "--gpus", "0", hint="deploy"),
    "a contradiction": up(
        "--gpus 3 --topology 2p2d", 2, "--gpus 3", "2p2d", "4 engines", hint="--gpus 3"
    ),
    "no topology": up("--topology 1x2", 2, "--topology", "'1x2'", "1p3d", hint="deploy"),
    "tensor parallel": up("--tp 3", 2, "--tp: 3", "2 KV heads", hint="--tp 2"),
    "unknown vendor": up("--vendor abacus", 2, "--vendor", "'abacus'", "'cpu'", hint="deploy"),
    "unknown key": up(
        "-f stack.yaml", 2, "stack.yaml", "lmcache.chunk_sise", "did you mean 'chunk_size'?",
        hint="stack.yaml", files={"stack.yaml": "lmcache:\n  chunk_sise: 256\n"},
    ),
    "broken yaml": up(
        "", 2, "deploy.yaml", "line 3", hint="deploy.yaml",
        files={"deploy.yaml": "name: a\ngpus: [\n"},
    ),
    "no such file": up("-f none.yaml", 2, "none.yaml", hint="-f"),
    "missing model folder": up("--model ./none", 2, "'./none'", "does not exist", hint="--model"),
    "model without config": up(
        "--model ./m", 2, "'./m'", "config.json", hint="--model", files={"m/weights": ""}
    ),
    "model with broken config": up(
        "--model ./m", 2, "config.json", hint="restore", files={"m/config.json": "{"}
    ),
    "chunk of broken blocks": up(
        "", 2, "lmcache.chunk_size: 100", "engine.block_size 32",
        hint="set lmcache.chunk_size to 96", files={"deploy.yaml": "lmcache: {chunk_size: 100}\n"},
    ),
    "name with a slash": up("--name a/b", 2, "--name", "'a/b'", hint="deploy"),
    "name with a slash, in a command on a stack": Case(
        ("status", "--name", "a/b"), 2, ("--name", "'a/b'"), "deploy"
    ),
    "broken state file": up(
        "", 2, "state file", "pdkit", "broken", hint="deploy down", code="state",
        state='{"format": 1',
    ),
    "no such stack": Case(("check",), 2, ("no stack 'pdkit'",), "deploy up", "state"),
    "no redis-server": up(
        "", 3, "redis.server", "/nonexistent", hint="redis.server", code="missing_tool",
        files={"deploy.yaml": "redis: {server: /nonexistent}\n"},
    ),
    "no engine packages": up(
        "", 3, "/python", "lacks vllm", hint="quickstart", code="missing_tool",
        files={
            "deploy.yaml": "engine: {python: FOLDER/python}\n",
            "python": "#!/bin/sh\necho vllm\n",
        },
    ),
    "port taken": up(
        "--port {taken}", 3, "{taken}", "router", "taken", hint="--port", code="port_taken"
    ),
    "unknown profile": compose(
        "--vendor cuda --image cudda", 2, "--image", "'cudda'", "did you mean 'cuda'?",
        hint="deploy images list",
    ),
    "image without a tag": compose(
        "--vendor cuda --image vllm/vllm-openai", 2, "'vllm/vllm-openai'", "tag or a digest",
        hint="deploy images list",
    ),
    "image in capitals": compose(
        "--vendor cuda --image Mine/vLLM:1", 2, "'Mine/vLLM:1'", "lower case",
        hint="deploy images list",
    ),
    "another vendor's profile": compose(
        "--vendor cuda --image rocm", 2, "--image", "'rocm'", "vendor is cuda",
        hint="--vendor rocm --image rocm",
    ),
    "an untested pair of versions": up(
        "", 2, "vLLM 0.33.0 with LMCache 0.5.6 on cpu is untested", "profile 'cpu'",
        hint="--allow-untested",
        files={"deploy.yaml": "engine: {python: FOLDER/other}\n", "other": OTHER_VERSIONS},
    ),
    "too few GPUs": compose(
        "--gpus 4 --inventory machine.yaml", 3, "4 GPUs needed for --vendor rocm", "2 found",
        hint="--gpus 2", code="missing_gpus", files={"machine.yaml": TWO_GPUS},
    ),
    "GPUs left over": compose(
        "--vendor cuda --gpus 3 --tp 2", 2, "--gpus: 3", "--tp 2", hint="--gpus 4 --tp 2"
    ),
    "a share of a GPU past the plan": compose(
        "--vendor cuda", 2, "engine.args", "'--gpu-memory-utilization'", hint="engine.gpu_memory",
        files={"deploy.yaml": "engine: {args: [--gpu-memory-utilization=0.5]}\n"},
    ),
    "roles of different sizes": compose(
        "--vendor cuda", 2, "producer_tp", "no longer a setting", hint="leave producer_tp out",
        files={"deploy.yaml": "producer_tp: 2\n"},
    ),
    "a secret that everybody could read": compose(
        "--vendor cuda", 2, "engine.env: MY_TOKEN", "docker inspect", hint="hf_token_file",
        files={"deploy.yaml": "engine: {env: {MY_TOKEN: hunter2}}\n"},
    ),
    "unknown access": compose(
        "--vendor cuda", 2, "gpu_access", "'usb'", "'cdi'", hint="deploy.yaml",
        files={"deploy.yaml": "gpu_access: usb\n"},
    ),
    "no such inventory": compose("--inventory none.yaml", 2, "none.yaml", hint="--inventory"),
    "swap to nothing": Case(
        ("swap",), 2, ("give a vendor or --image to swap to",), "deploy swap", "usage"
    ),
    "swap to an unknown vendor": Case(
        ("swap", "abacus"), 2, ("'abacus'", "cuda, rocm, cpu"), "deploy", "usage"
    ),
    "swap to an unknown connector": Case(
        ("swap", "--connector", "mp"), 2, ("--connector: 'mp'", "lmcache, lmcache-mp"),
        "deploy swap --connector lmcache-mp", "usage",
    ),
    "swap of no stack": Case(("swap", "rocm"), 2, ("no stack 'pdkit'",), "deploy up", "state"),
    "restart of no stack": Case(("restart",), 2, ("no stack 'pdkit'",), "deploy up", "state"),
    "drain of no stack": Case(
        ("drain", "consumer-0"), 2, ("no stack 'pdkit'",), "deploy up", "state"
    ),
    "undrain of no stack": Case(
        ("undrain", "consumer-0"), 2, ("no stack 'pdkit'",), "deploy up", "state"
    ),
    "drain of nothing": Case(("drain",), 2, ("engine",), "deploy drain --help", "usage"),
    "restart with a negative wait": Case(
        ("restart", "--wait", "-1"), 2, ("--wait -1 is not a number",), "--wait 600", "usage"
    ),
    "rollback of no stack": Case(("rollback",), 2, ("no stack 'pdkit'",), "deploy up", "state"),
    "unknown image": Case(
        ("images", "build", "cpus"), 2, ("'cpus'", "cuda, cuda-mp, rocm"), "deploy images list"
    ),
    "an image that is pulled": Case(
        ("images", "build", "redis"), 2, ("'redis'", "pulled"), "deploy images pull redis"
    ),
    "no image named": Case(("images", "build"), 2, ("names",), "--help", "usage"),
    "port too low": up("--port 80", 2, "--port", "80", hint="deploy"),
    "unknown option": up("--gpu 4", 2, "--gpu", hint="deploy up --help", code="usage"),
    "no number": up(
        "--gpus four", 2, "invalid value 'four' for '--gpus': expected a whole number",
        hint="deploy up --help", code="usage",
    ),
    "a key twice": up(
        "", 2, "deploy.yaml: duplicate key 'tp' (lines 1 and 2)", hint="deploy.yaml",
        files={"deploy.yaml": "tp: 1\ntp: 2\n"},
    ),
    "a value of the file is not called a flag": up(
        "--name a", 2, "deploy.yaml: tp: 3 does not divide", hint="deploy up --name a --tp 2",
        files={"deploy.yaml": "tp: 3\n"},
    ),
    "another vendor's name": up("--vendor nvidia", 2, "did you mean 'cuda'?", hint="deploy up"),
    "swap to another vendor's name": Case(
        ("swap", "AMD"), 2, ("'AMD'", "did you mean 'rocm'?"), "deploy swap rocm", "usage"
    ),
    "help of another command": Case(
        ("down", "--name", "a/b"), 2, ("--name",), "deploy down --help"
    ),
    "more GPUs than an inventory has": Case(
        ("plan", "--vendor", "auto", "--inventory", "m.yaml", "--topology", "2p2d", "--tp", "2"),
        3, ("8 GPUs needed for --vendor rocm", "4 found"),
        "deploy plan --vendor auto --inventory m.yaml --tp 2 --gpus 4", "missing_gpus",
        files={"m.yaml": TWO_GPUS.replace("count: 2", "count: 4")},
    ),
    "ranks that do not divide the heads of all the GPUs": compose(
        "--vendor cuda --gpus 6 --tp 3", 2, "--tp: 3",
        hint="deploy render --runtime compose --vendor cuda --topology 1p1d --tp 2",
    ),
    "no key": Case(
        ("plan", "--api-key-file", "none"), 2,
        ("--api-key-file: ", "/none cannot be read: No such file or directory"), "api_key_file",
    ),
    "a key that is a folder, of a rendered stack": Case(
        ("render", "-o", "out", "--api-key-file", "."), 2,
        ("--api-key-file: ", "is not a regular file"), "api_key_file",
    ),
    "a key of the file": Case(
        ("plan",), 2, ("deploy.yaml: api_key_file: ",), "api_key_file",
        files={"deploy.yaml": "api_key_file: none\n"},
    ),
    "no URL of a Redis": Case(
        ("plan",), 2, ("deploy.yaml: redis.url_file: ", "cannot be read: No such file"),
        "redis.url_file", files={"deploy.yaml": "redis: {url_file: none}\n"},
    ),
    "an empty URL of a Redis, of a rendered stack": Case(
        ("render", "-o", "out"), 2, ("deploy.yaml: redis.url_file: ", "/url is empty"), "fill it",
        files={"deploy.yaml": "redis: {url_file: url}\n", "url": "\n"},
    ),
    "no scheme of Redis": up(
        "", 2, "redis.url_file: ", "/url does not contain a Redis URL: unsupported scheme http://",
        hint="redis-cluster://",
        files={"deploy.yaml": "redis: {url_file: url}\n", "url": "http://cache:6379\n"},
    ),
    "two Redis": Case(
        ("render",), 2, ("redis.memory_gib: 2", "redis.url_file"), "leave redis.memory_gib out",
        files={"deploy.yaml": "redis: {url_file: url, memory_gib: 2}\n"},
    ),
    "a Redis that does not answer": up(
        "", 3, "redis.url_file: ", "redis://127.0.0.1:1", "refused", hint="deploy up --dry-run",
        code="redis_unreachable",
        files={"deploy.yaml": "redis: {url_file: url}\n", "url": "redis://:pass@127.0.0.1:1\n"},
    ),
    "no folder to render into": Case(
        ("render", "-o", "file/deep"), 2, ("-o: 'file/deep' cannot be created",),
        "deploy render -o",
        files={"file": ""},
    ),
    "a Redis image that can be none": compose(
        "--vendor cpu", 2, "deploy.yaml: redis.image: 'Redis Latest'", "redis-local",
        hint="deploy images list", files={"deploy.yaml": "redis: {image: Redis Latest}\n"},
    ),
    "a sweep of nothing": Case(
        ("bench", "sweep", "--vendor", "cpu"), 2, ("no number of engines to split",),
        "deploy bench sweep --engines 4", "usage",
    ),
    "a sweep of what is no topology": Case(
        ("bench", "sweep", "--topologies", "1p1d,3x"), 2, ("--topologies: '3x' is not",),
        "deploy bench sweep --topologies 1p1d,1p2d,2a,2a+redis", "usage",
    ),
    "a sweep with two numbers": Case(
        ("bench", "sweep", "--gpus", "2", "--engines", "3"), 2, ("--engines and --gpus",),
        "leave out one of them", "usage",
    ),
    "a sweep of engines on GPUs": Case(
        ("bench", "sweep", "--engines", "3", "--vendor", "cuda"), 2, ("--engines: 3", "cuda"),
        "deploy bench sweep --gpus 3", "usage",
    ),
    "a sweep from no rate": Case(
        ("bench", "sweep", "--engines", "2", "--rate", "0"), 2, ("--rate 0",),
        "deploy bench sweep --rate 1", "usage",
    ),
    "a sweep with an unknown limit": Case(
        ("bench", "sweep", "--engines", "2", "--slo", "tpot=1s"), 2, ("--slo tpot=1s",),
        "deploy bench --slo", "usage",
    ),
    "unknown command": Case(("upp",), 2, ("'upp'",), "deploy --help", "usage"),
    "unknown command of a group": Case(
        ("images", "lst"), 2, ("'lst'",), "deploy images --help", "usage"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a case is tried: a folder, a PDKIT_HOME, and stand-ins for the engines' packages."""

    folder: Path
    home: Path
    packages: Path
    taken_port: int

    def argv(self, case: Case) -> tuple[str, ...]:
        return tuple(part.format(taken=self.taken_port) for part in case.arguments)

    def named(self) -> dict[str, str]:
        """Return the variable by which the user names the folder's stack file, if it has one."""
        has_file = (self.folder / "deploy.yaml").exists()
        return {"PDKIT_FILE": "deploy.yaml"} if has_file else {}

    def lay_out(self, case: Case) -> None:
        for name, text in case.files.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.replace("FOLDER", str(self.folder)))
            path.chmod(0o755)
        if case.state is not None:
            file = self.home / "stacks" / "pdkit" / "state.json"
            file.parent.mkdir(parents=True)
            file.write_text(case.state)

    def left(self) -> list[str]:
        """Return the files in PDKIT_HOME."""
        return [str(p.relative_to(self.home)) for p in self.home.rglob("*") if p.is_file()]


@dataclass(frozen=True)
class Tried:
    """A case that was run as text."""

    case: Case
    place: Place
    ended: Ended

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word.format(taken=self.place.taken_port) for word in self.case.words)


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    port = free_row()
    with taken(port):
        yield port


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules that are named as the engines' are."""
    folder = tmp_path_factory.mktemp("packages")
    for module in ("vllm", "lmcache", "httptools", "uvloop"):
        (folder / module).mkdir()
        (folder / module / "__init__.py").touch()
    return folder


@pytest.fixture(scope="module")
def all_tried(
    tmp_path_factory: pytest.TempPathFactory,
    deploy_here: Callable[..., Ended],
    packages: Path,
    taken_port: int,
) -> dict[str, Tried]:
    """Run every case as text."""

    def run(case: Case) -> Tried:
        make = tmp_path_factory.mktemp
        place = Place(make("folder"), make("home"), packages, taken_port)
        place.lay_out(case)
        python_path = str(packages)
        argv = place.argv(case)
        ended = deploy_here(
            *argv, cwd=place.folder, home=place.home, PYTHONPATH=python_path, **place.named()
        )
        return Tried(case, place, ended)

    return {name: run(case) for name, case in CASES.items()}


@pytest.fixture(params=CASES)
def tried(request: pytest.FixtureRequest, all_tried: dict[str, Tried]) -> Tried:
    return all_tried[request.param]


def test_bad_input_is_one_error_with_a_hint(tried: Tried) -> None:
    ended = tried.ended
    assert ended.code == tried.case.exit_code, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("reading ")]
    error, advice = lines  # one of each, and nothing else
    assert error.startswith("error: ")
    for word in tried.words:
        assert word in error
    assert advice.startswith("try: ")
    assert tried.case.hint in advice


@pytest.mark.parametrize("name", ["a contradiction", "port taken", "broken state file"])
def test_a_process_reports_bad_input_the_same_way(
    name: str, all_tried: dict[str, Tried], deploy: Callable[..., Ended]
) -> None:
    """It sees the real machine, of which it may warn."""
    case, place, here = all_tried[name].case, all_tried[name].place, all_tried[name].ended
    python_path = str(place.packages)
    ended = deploy(
        *place.argv(case),
        cwd=place.folder,
        home=place.home,
        PYTHONPATH=python_path,
        **place.named(),
    )
    lines = ended.stderr.splitlines(keepends=True)
    said = "".join(line for line in lines if "] warning: " not in line)
    assert (ended.code, ended.stdout) == (here.code, "")
    assert _any_port(said) == _any_port(here.stderr)


def test_bad_input_is_a_json_envelope(tried: Tried, deploy_here: Callable[..., Ended]) -> None:
    place, case = tried.place, tried.case
    argv = (*place.argv(case), "--json")
    ended = deploy_here(
        *argv,
        cwd=place.folder,
        home=place.home,
        PYTHONPATH=str(place.packages),
        **place.named(),
    )
    envelope = json.loads(ended.stdout)  # exactly one
    assert set(envelope) == {"version", "command", "status", "exit_code", "data", "errors"}
    assert envelope["status"] == "error"
    assert envelope["exit_code"] == ended.code == case.exit_code
    assert case.arguments[0] == envelope["command"].split()[0]
    assert envelope["data"] is None
    (error,) = envelope["errors"]
    assert error["code"] == case.code
    said = f"error: {error['message']}\ntry: {error['hint']}\n"
    assert _any_port(said) in _any_port(tried.ended.stderr)
    assert "error:" not in ended.stderr


def _any_port(text: str) -> str:
    """Leave out which port is proposed: what is free may change between two runs."""
    return re.sub(r"--port \d+", "--port N", text)


def test_bad_input_leaves_no_file(tried: Tried) -> None:
    left = [path for path in tried.place.left() if not path.startswith("named-files/")]
    assert left == (["stacks/pdkit/state.json"] if tried.case.state else [])


def test_a_process_prints_json_alone_on_stdout(
    deploy: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = deploy("up", "--gpus", "0", "--json", cwd=tmp_path, home=tmp_path / "home")
    assert (ended.code, ended.stderr) == (2, "")
    assert json.loads(ended.stdout)["exit_code"] == 2
