"""One stack, 1p1d: what `up` proves, what clients get, what the other commands say of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from deploy.runtime.engine_api import bearer
from deploy.runtime.home import Home
from tests.e2e.conftest import Deploy, Ran, eventually
from tests.e2e.one_stack.conftest import NAME, PORT

pytestmark = pytest.mark.quick
MODEL = "pdkit-tiny"
PRODUCER, CONSUMER = PORT + 10, PORT + 11


@pytest.fixture(scope="module")
def again(kit: Deploy, up: Any) -> Ran:
    """Run `up` on the running stack, which changes nothing of it."""
    assert up["started"]
    before = kit.state(NAME)
    options = ("--topology", "1p1d", "--monitoring")
    ran = kit.run("up", "--name", NAME, "--port", str(PORT), *options)
    assert kit.state(NAME) == before
    return ran


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none") as api:
        yield api


def running_requests(kit: Deploy, port: int) -> float:
    return counted(kit, port, "vllm:num_requests_")


def generated(kit: Deploy, port: int) -> float:
    """Return how many tokens an engine has generated."""
    return counted(kit, port, "vllm:generation_tokens_total")


def counted(kit: Deploy, port: int, name: str) -> float:
    url, headers = f"http://127.0.0.1:{port}/metrics", bearer(kit.engine_key(NAME))
    text = httpx.get(url, headers=headers, trust_env=False, timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert lines, f"the engine counts no {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class TestUp:
    def test_up_proves_that_kv_is_reused(self, up: Any) -> None:
        check = up["check"]
        assert check["passed"] is True
        assert [(p["producer"], p["consumer"]) for p in check["pairs"]] == [
            ("producer-0", "consumer-0")
        ]
        assert check["hit_rate"]["eligible_rate"] == 1.0
        assert check["hit_rate"]["hits"] == check["hit_rate"]["eligible"] > 1000
        assert 0.8 < check["hit_rate"]["rate"] < 1.0
        assert check["pairs"][0]["tiers"]["redis"] == check["hit_rate"]["hits"]
        assert check["equivalence"]["compared"] >= 2
        assert check["equivalence"]["mismatched"] == 0
        assert check["redis"]["keys_after"] > check["redis"]["keys_before"] == 0
        assert check["diagnosis"] == []

    def test_up_starts_engines_at_the_same_time(self, kit: Deploy, up: Any) -> None:
        """What `up` takes is the slowest engine's start, then, and not the sum of all."""
        services = kit.state(NAME)["services"]
        engines = ("producer-0", "consumer-0")
        began = {name: psutil.Process(services[name]["pid"]).create_time() for name in engines}
        first, second = sorted(engines, key=lambda name: began[name])
        assert began[second] < began[first] + up["started"][first]
        assert up["slowest_engine_s"] == max(up["started"][name] for name in engines)

    def test_a_second_up_changes_nothing(self, again: Ran) -> None:
        assert again.code == 0, again
        assert "already up" in again.stderr
        assert "External prefix cache hit rate" in again.stdout

    def test_up_with_another_plan_is_refused(self, kit: Deploy) -> None:
        before = kit.state(NAME)
        ran = kit.run("up", "--name", NAME, "--port", str(PORT), "--topology", "1p2d")
        assert ran.code == 2, ran
        assert "another plan" in ran.stderr
        assert kit.state(NAME) == before


class TestClients:
    def test_the_model_is_listed(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]

    def test_a_completion_is_answered(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model=MODEL, prompt="To be", max_tokens=8)
        assert answer.choices[0].text
        assert answer.usage and answer.usage.completion_tokens == 8

    def test_a_chat_is_answered(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("length", "stop")

    def test_a_stream_gives_the_same_text_as_a_whole_answer(self, client: openai.OpenAI) -> None:
        ask: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Count to ten."}],
            "max_tokens": 16,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**ask).choices[0].message.content
        parts = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**ask, stream=True)
            if chunk.choices
        ]
        # The role is one; a busy engine may say the rest in one.
        assert len(parts) > 1
        assert "".join(parts) == whole

    def test_different_prompts_get_different_answers(self, client: openai.OpenAI) -> None:
        answers = {
            client.completions.create(
                model=MODEL, prompt=f"What is {n} and {n}?", max_tokens=16, temperature=0
            ).choices[0].text
            for n in range(5)
        }  # fmt: skip
        assert len(answers) == 5

    def test_unknown_model_is_a_clean_404(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="nobody", prompt="x", max_tokens=1)
        assert "nobody" in caught.value.message

    def test_prompt_over_the_context_is_a_clean_400(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="word " * 20_000, max_tokens=1)
        assert "context" in caught.value.message
        assert client.completions.create(model=MODEL, prompt="still there?", max_tokens=1)

    def test_curl_gets_an_answer(self) -> None:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
        done = subprocess.run(
            ("curl", "--silent", "--fail", "--noproxy", "*",
             f"http://127.0.0.1:{PORT}/v1/completions",
             "-H", "Content-Type: application/json", "-d", json.dumps(body)),
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 4

    def test_client_that_disconnects_leaves_nothing_behind(self, kit: Deploy) -> None:
        router = psutil.Process(kit.pid(NAME, "router"))
        tokens = 8000
        body = {"model": MODEL, "prompt": "Tell me all", "max_tokens": tokens, "stream": True,
                "ignore_eos": True}  # fmt: skip
        with httpx.Client(trust_env=False, timeout=60) as http:
            http.get(f"http://127.0.0.1:{PORT}/v1/models")
        files_before, before = router.num_fds(), generated(kit, CONSUMER)
        for _ in range(10):
            with (
                httpx.Client(trust_env=False, timeout=60) as http,
                http.stream("POST", f"http://127.0.0.1:{PORT}/v1/completions", json=body) as answer,
            ):
                assert answer.status_code == 200
                next(answer.iter_lines())
        for port in (PRODUCER, CONSUMER):
            assert eventually(lambda port=port: running_requests(kit, port) == 0)
        assert generated(kit, CONSUMER) - before < 10 * tokens / 2, "they were not ended, but done"
        assert eventually(lambda: router.num_fds() <= files_before + 3)


class TestOtherCommands:
    def test_status_shows_a_healthy_stack(self, kit: Deploy) -> None:
        data = kit.ok("status", "--name", NAME)
        assert data["healthy"] is True
        assert {s["name"]: s["condition"] for s in data["services"]} == dict.fromkeys(
            ("redis", "producer-0", "consumer-0", "router", "prometheus"), "ready"
        )
        assert data["external_hit_rate"] > 0.3
        assert "consumer-0" in kit.run("status", "--name", NAME).stdout

    def test_logs_shows_the_last_lines_and_refuses_unknown_services(self, kit: Deploy) -> None:
        ran = kit.run("logs", "consumer-0", "--name", NAME, "-n", "20")
        assert ran.code == 0, ran
        assert 0 < len(ran.stdout.splitlines()) <= 20
        unknown = kit.run("logs", "consumer-9", "--name", NAME)
        assert unknown.code == 2
        assert "consumer-0" in unknown.stderr

    def test_check_can_be_repeated(self, kit: Deploy) -> None:
        data = kit.ok("check", "--quick", "--name", NAME)
        assert data["passed"] and data["hit_rate"]["eligible_rate"] == 1.0

    def test_every_needed_fix_is_reported_by_each_engine(self, kit: Deploy) -> None:
        for engine in ("producer-0", "consumer-0"):
            assert "pdkit-connector fix=B17 state=applied" in kit.log(NAME, engine)

    @pytest.mark.parametrize("port", [PRODUCER, CONSUMER], ids=["producer", "consumer"])
    def test_engines_serve_their_stack_only(self, kit: Deploy, port: int) -> None:
        def codes(headers: dict[str, str]) -> list[int]:
            paths = ("/health", "/v1/models", "/metrics", "/version", "/openapi.json")
            urls = [f"http://127.0.0.1:{port}{path}" for path in paths]
            return [
                httpx.get(one, headers=headers, trust_env=False, timeout=60).status_code
                for one in urls
            ]

        assert codes({}) == [200, 401, 401, 401, 401]
        assert codes({"Authorization": "Bearer none"}) == [200, 401, 401, 401, 401]
        assert codes(bearer(kit.engine_key(NAME))) == [200, 200, 200, 200, 200]

    def test_secrets_are_shown_nowhere(self, kit: Deploy) -> None:
        password, key = kit.password(NAME), kit.engine_key(NAME).reveal()
        shown = [
            kit.run("render", "--name", NAME, "--port", str(PORT), "--monitoring").stdout,
            kit.run("status", "--name", NAME, "--json").stdout,
            json.dumps(kit.state(NAME)),
            *(kit.log(NAME, service) for service in kit.state(NAME)["services"]),
        ]
        for process in kit.processes(NAME):
            shown += [" ".join(process.cmdline()), json.dumps(process.environ())]
        assert len(shown) > 10
        assert not any(secret in text for text in shown for secret in (password, key))
        # The search would find it: it is in the one file that must have it.
        config = kit.home / "stacks" / NAME / "run" / "redis" / "redis.conf"
        assert password in config.read_text()
        assert config.stat().st_mode & 0o077 == 0

    def test_redis_refuses_without_the_password_and_has_no_port(self, kit: Deploy) -> None:
        import redis

        path = Home(kit.home, kit.home).stack(NAME).temp_dir / "redis.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(unix_socket_path=str(path)).ping()
        with pytest.raises(redis.ConnectionError):
            redis.Redis(port=PORT + 1).ping()
