"""The steps of the proof, in their order. Each takes a session and returns what was seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu_proof import model, prompts, vendor_tools
from bench.gpu_proof.results import WRONG_ANSWERS
from bench.gpu_proof.session import Session, Setup, Stack, StepFailed
from deploy.config.fields import IN_ENGINES, MP, Connector

_SERVER = Setup(connector=MP)
Found = tuple[Mapping[str, Any], Sequence[str]]  # facts and failures


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        short: it is part of the short form, which starts one stack.
        connector: it runs where this one works with the installed versions; None: anywhere.
        needs_gpus: how many; 0 runs on CPUs, too.
    """

    name: str
    title: str
    run: Callable[[Session], Found]
    short: bool = True
    needs_gpus: int = 0
    connector: Connector | None = IN_ENGINES


def tools(session: Session) -> Found:
    machine = vendor_tools.inventory()
    name = vendor_tools.short_name(machine, session.vendor)
    files = vendor_tools.record(session.state / "fixtures", name)
    gpus = [f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in machine.gpus_of(session.vendor)]
    return {"name": name, "GPUs": gpus, "probes": machine.seen, "fixtures": files}, []


def make_model(session: Session) -> Found:
    folder = model.make(session.models, session.shape)
    size = (folder / "model.safetensors").stat().st_size
    return {"model": folder.name, "weights, MB": round(size / 1e6)}, []


def up(session: Session) -> Found:
    doctor = session.deploy("doctor", "-f", str(session.spec_file()), codes=(0, 1, 2, 3))
    said = [f"{one['id']}: {one['message']}" for one in doctor["findings"] if one["status"] != "ok"]
    session.stack(check=True)
    status = session.deploy("status", "--name", "gpu-proof")
    return {"services": [one["name"] for one in status["services"]], "doctor": said}, []


def check(session: Session) -> Found:
    session.stack()
    return _checked(session, "--repeat", "1" if session.small else "3")


def edges(session: Session) -> Found:
    return _edges(session.stack())


def long(session: Session) -> Found:
    stack, tokens = session.stack(), 4000 if session.small else 32_000
    before = {name: stack.store_path(name) for name in ("producer-0", "consumer-0")}
    crossing = prompts.cross(stack, tokens)
    moved = {name: stack.store_path(name).since(path) for name, path in before.items()}
    facts = {
        "prompts": [crossing.row()],
        "stored, MB": round(moved["producer-0"].stored_bytes / 1e6, 1),
        "chunks not stored": moved["producer-0"].left_out,
        "chunks not loaded": moved["consumer-0"].not_loaded + moved["consumer-0"].refused,
    }
    lost = [
        f"{name}: {facts[name]:g}" for name in facts if name.startswith("chunks") and facts[name]
    ]
    return facts, [*crossing.failures, *lost]


def path(session: Session) -> Found:
    tokens, rounds = _timed_prompts(session)
    facts = prompts.rates(session.stack(), tokens, rounds)
    lost = facts["chunks not loaded"]
    wanted = rounds * (tokens // prompts.CHUNK)
    if lost or facts["chunks loaded"] < wanted:
        return facts, [f"{facts['chunks loaded']:g} of {wanted} chunks loaded, {lost:g} lost"]
    return facts, []


def _timed_prompts(session: Session) -> tuple[int, int]:
    """Return how long the prompts are whose first tokens are timed, and how many rounds."""
    return (2000, 2) if session.small else (8000, 5)


def redis_killed(session: Session) -> Found:
    return _redis_killed(session, session.stack())


def layerwise(session: Session) -> Found:
    return _started_and_checked(session, Setup(layerwise=True))


def decode(session: Session) -> Found:
    setup = Setup(save_decode_cache=True)
    session.stack(setup)
    facts, failures = _checked(session)
    reuse = facts["decode_reuse"]
    if not reuse or not reuse["eligible"] or reuse["hits"] != reuse["eligible"]:
        failures = [*failures, f"what a consumer decoded was not found again: {reuse}"]
    return facts, failures


def two_gpus(session: Session) -> Found:
    return _started_and_checked(session, Setup(gpus=2))


def server_long(session: Session) -> Found:
    crossing = prompts.cross(session.stack(_SERVER), 4000 if session.small else 32_000)
    return {"prompts": [crossing.row()]}, crossing.failures


def server_path(session: Session) -> Found:
    tokens, rounds = _timed_prompts(session)
    facts = prompts.tier_rates(session.stack(_SERVER), tokens, rounds)
    lost = facts["tokens not loaded"]
    return facts, [f"{lost} tokens were not loaded"] if lost else []


def server_killed(session: Session) -> Found:
    stack = session.stack(_SERVER)
    try:
        killed = prompts.kill_server_before_load(stack, 4 * prompts.CHUNK + 1)
    finally:
        session.stack(_SERVER, check=True)  # starts it again
    facts = {"chunks lost": killed.not_loaded, "difference": prompts.told(killed.difference)}
    return facts, _answers_after(stack, killed)


def runner(version: int, *, asynchronous: bool) -> Callable[[Session], Found]:
    """Return the step that tries one model runner and one scheduling mode of vLLM."""
    flag = "--async-scheduling" if asynchronous else "--no-async-scheduling"
    setup = Setup(env={"VLLM_USE_V2_MODEL_RUNNER": str(version - 1)}, args=(flag,))

    def run(session: Session) -> Found:
        stack = session.stack(setup)
        if stack.says("Using V2 Model Runner") != (version == 2):
            raise StepFailed("another runner ran")
        parts = (_edges(stack), _redis_killed(session, stack))
        # Wrong answers are what this step looks for: they show that the pins are needed.
        wrong = [failure for _, failures in parts for failure in failures]
        return {WRONG_ANSWERS: wrong, **parts[0][0], **parts[1][0]}, []

    return run


def _started_and_checked(session: Session, setup: Setup) -> Found:
    stack = session.stack(setup)
    facts, failures = _checked(session)
    more, others = _edges(stack)
    return {**facts, **more}, [*failures, *others]


def _by_server(gpus: int) -> Callable[[Session], Found]:
    return lambda session: _started_and_checked(session, Setup(gpus=gpus, connector=MP))


def _checked(session: Session, *options: str) -> Found:
    data = session.deploy("check", "--name", "gpu-proof", *options, codes=(0, 1))
    rate, answers = data["hit_rate"], data["equivalence"]
    facts = {
        "runs": data.get("runs", 1),
        "eligible hit rate": rate["eligible_rate"],
        "mismatches": answers["mismatched"],
        "largest difference": answers["max_logprob_diff"],
        "decode_reuse": data.get("decode_reuse"),
    }
    return facts, [] if data["passed"] else list(data["failures"])


def _edges(stack: Stack) -> Found:
    found = [prompts.cross(stack, tokens) for tokens in prompts.EDGES]
    failures = [failure for one in found for failure in one.failures]
    return {"prompts": [one.row() for one in found]}, failures


def _redis_killed(session: Session, stack: Stack) -> Found:
    try:
        killed = prompts.kill_redis_before_load(stack, 4 * prompts.CHUNK + 1)
    finally:
        session.stack(stack.setup, check=True)  # starts Redis again
    facts = {
        "chunks found and not loaded": killed.not_loaded,
        "difference after Redis died": prompts.told(killed.difference),
    }
    if not killed.not_loaded:
        raise StepFailed("Redis died too late: nothing that was found failed to load")
    return facts, _answers_after(stack, killed)


def _answers_after(stack: Stack, killed: prompts.Killed) -> list[str]:
    """Return what is wrong with the answer after a kill, and with one after the restart."""
    wrong = [] if killed.matches else [f"the answer is wrong: {prompts.told(killed.difference)}"]
    again = prompts.cross(stack, 514)
    return [*wrong, *(f"after the restart, {failure}" for failure in again.failures)]


STEPS: tuple[Step, ...] = (
    Step("tools", "what the vendor's tools print", tools, connector=None),
    Step("model", "a model with random weights, made on the spot", make_model, connector=None),
    Step("up", "`deploy doctor` and `deploy up`, its check included", up),
    Step("check", "`deploy check --repeat 3`", check),
    Step("edges", "prompts around two whole chunks, computed against loaded", edges),
    Step("long", "one long prompt", long),
    Step("path", "the Redis path: rates and first tokens", path),
    Step("redis-killed", "Redis killed between lookup and load, and started again", redis_killed),
    Step("layerwise", "KV moved layer by layer", layerwise, short=False),
    Step("decode", "KV of what consumers decode", decode, short=False),
    *(
        Step(
            f"runner-{version}-{'async' if asynchronous else 'sync'}",
            f"vLLM's {('first', 'second')[version - 1]} model runner, "
            f"{'asynchronous' if asynchronous else 'synchronous'} scheduling",
            runner(version, asynchronous=asynchronous),
            short=False,
            needs_gpus=1,
        )
        # The fourth combination is that of the pins, which all other steps run.
        for version, asynchronous in ((2, True), (1, True), (2, False))
    ),
    Step("two-gpus", "producer and consumer on a GPU each", two_gpus, short=False, needs_gpus=2),
    *(
        Step(f"server{name}", f"LMCache's server: {title}", run, False, gpus, MP)
        for name, title, run, gpus in (
            ("", "`check`, with Redis alone, and prompts around two chunks", _by_server(1), 0),
            ("-long", "one long prompt", server_long, 0),
            ("-path", "first tokens: computed, from its memory, from Redis", server_path, 0),
            ("-killed", "killed when it has a prompt, and started again", server_killed, 0),
            ("-two-gpus", "producer and consumer on a GPU each", _by_server(2), 2),
        )
    ),
)
