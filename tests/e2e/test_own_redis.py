"""Real engines with a Redis of the user's own: TLS with a password, and then a cluster of three.

The stack goes from the one to the other because the file that holds the URL says another one.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bench.redis_server import free_port
from tests.connector.redis_servers import Server, Servers, eventually
from tests.e2e.conftest import Deploy, running_stack
from tests.e2e.traffic import MODEL, text
from tests.ports import free_row

NAME = "own"
PREFIX = f"pdkit:{NAME}:*"
PASSWORD = "correct horse"
WRITTEN = "correct%20horse"
CHUNK_BYTES = 256 * 2048  # of the tiny model's KV
CANARY = b"@pdkit%canary-"
CANARY_CHUNKS = 2  # of each check that passed; they stay for the next one


@dataclass(frozen=True)
class Own:
    """A stack with a Redis of the user's own, and the file that holds its URL."""

    kit: Deploy
    file: Path
    spec: Path
    port: int

    def options(self) -> tuple[str, ...]:
        return "--name", NAME, "--port", str(self.port), "-f", str(self.spec)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with cert.pem, which vouches for itself, and key.pem."""
    folder = tmp_path_factory.mktemp("certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    )
    return folder


@pytest.fixture(scope="module")
def tls(servers: Servers, certificate: Path) -> Server:
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    options = ("--tls-cert-file", str(cert), "--tls-key-file", str(key))
    options += ("--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no")
    arguments = {"ssl": True, "ssl_ca_certs": str(cert)}
    server = servers.start(*options, "--requirepass", PASSWORD, tls=arguments)
    server.admin.set("of-somebody-else", b"x")
    return server


@pytest.fixture(scope="module")
def cluster(servers: Servers) -> list[Server]:
    """Return three masters that share the slots."""
    nodes = [
        servers.start(
            "--cluster-enabled", "yes", "--cluster-port", str(free_port()),
            "--requirepass", PASSWORD,
        )
        for _ in range(3)
    ]  # fmt: skip
    for node, (first, last) in zip(nodes, ((0, 5460), (5461, 10922), (10923, 16383)), strict=True):
        node.admin.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
    for node in nodes[1:]:
        bus = node.admin.config_get("cluster-port")["cluster-port"]
        nodes[0].admin.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
    eventually(lambda: all(_slots_agreed(node) for node in nodes), 120)
    return nodes


def _slots_agreed(node: Server) -> bool:
    said = node.admin.execute_command("CLUSTER", "INFO").decode()
    return "cluster_state:ok" in said and "cluster_known_nodes:3" in said


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    return Deploy(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def own(home: Deploy, tls: Server, certificate: Path) -> Own:
    file, spec = home.home / "redis-url", home.home / "stack.yaml"
    ca = certificate / "cert.pem"
    file.write_text(f"rediss://:{WRITTEN}@127.0.0.1:{tls.port}?ssl_ca_certs={ca}\n")
    spec.write_text(yaml.safe_dump({"redis": {"url_file": str(file)}}))
    return Own(home, file, spec, free_row())


@pytest.fixture(scope="module")
def up(own: Own, tls: Server) -> Iterator[Any]:
    """Bring the stack up while somebody else fills the same Redis."""
    with (
        others_writing(tls),
        running_stack(own.kit, NAME, own.port, "-f", str(own.spec)) as data,
    ):
        yield data


@contextmanager
def others_writing(server: Server) -> Iterator[None]:
    """Write keys, one for every few milliseconds."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.005):
            number += 1
            server.admin.set(f"others:{number}", b"x")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def keys_of(server: Server) -> int:
    """Return how many keys the stack has there, but for those of the checks' canaries."""
    return sum(CANARY not in key for key in server.admin.scan_iter(PREFIX, count=1000))


def canary_keys_of(server: Server) -> int:
    return sum(CANARY in key for key in server.admin.scan_iter(PREFIX, count=1000))


def assert_proved(check: Any, chunks_at_least: int = 10) -> None:
    assert check["passed"] is True, check
    assert check["hit_rate"]["eligible_rate"] == check["store_race"]["eligible_rate"] == 1.0
    assert check["equivalence"]["compared"] >= 2
    assert check["equivalence"]["mismatched"] == 0
    assert check["diagnosis"] == []
    path = check["store_path"]
    assert path["stored_chunks"] >= chunks_at_least
    assert path["failures"] == path["refused"] == path["left_out"] == path["late"] == 0
    assert path["stored_bytes"] >= chunks_at_least * CHUNK_BYTES


def ask(own: Own) -> None:
    """Send a prompt of three chunks through the router."""
    prompt = text(3 * 256 + 10, random.random())
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    url = f"http://127.0.0.1:{own.port}/v1/completions"
    httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()


def assert_password_is_private(own: Own) -> None:
    kit = own.kit
    shown = [
        kit.run("render", "--runtime", "process", *own.options()).stdout,
        kit.run("plan", *own.options()).stdout,
        kit.run("status", "--name", NAME, "--json").stdout,
        kit.run("logs", "--name", NAME, "-n", "100000").stdout,
        json.dumps(kit.state(NAME)),
    ]
    for process in kit.processes(NAME):
        shown += [" ".join(process.cmdline()), json.dumps(process.environ())]
    assert len(shown) > 10
    for said in shown:
        assert said
        assert PASSWORD not in said
        assert WRITTEN not in said
    config = kit.home / "stacks" / NAME / "run" / "consumer-0" / "lmcache.yaml"
    assert WRITTEN in config.read_text(), "the search would find it"
    assert config.stat().st_mode & 0o077 == 0


def test_up_starts_nothing_if_redis_refuses(own: Own) -> None:
    text = own.file.read_text()
    own.file.write_text(text.replace(WRITTEN, "wrong"))
    try:
        ran = own.kit.run("up", *own.options())
    finally:
        own.file.write_text(text)
    assert ran.code == 3, ran
    assert "redis.url_file: the Redis at rediss://127.0.0.1:" in ran.stderr
    assert "wrong" not in ran.stderr.replace("WRONGPASS", "")
    assert own.kit.processes(NAME) == []
    own.kit.assert_nothing_left(NAME, own.port)


def test_a_stack_works_with_tls_and_a_password(own: Own, up: Any, tls: Server) -> None:
    assert list(up["started"]) == ["producer-0", "consumer-0", "router"]
    assert_proved(up["check"])
    assert up["check"]["redis"]["keys_removed"] == up["check"]["store_path"]["stored_chunks"]
    assert (keys_of(tls), canary_keys_of(tls)) == (0, CANARY_CHUNKS)
    ask(own)
    assert keys_of(tls) == 3
    assert tls.admin.exists("of-somebody-else")
    assert_password_is_private(own)
    status = own.kit.ok("status", "--name", NAME)
    assert status["healthy"] is True
    assert status["store"]["keys"] > keys_of(tls), "with those of others"


def test_a_stack_works_with_a_cluster(
    own: Own, up: Any, tls: Server, cluster: list[Server]
) -> None:
    assert up["check"]["passed"]
    router = own.kit.pid(NAME, "router")
    own.file.write_text(
        f"redis-cluster://:{WRITTEN}@" + ",".join(f"127.0.0.1:{node.port}" for node in cluster[:2])
    )
    before = keys_of(tls)
    moved = own.kit.ok("up", *own.options())
    assert set(moved["started"]) == {"producer-0", "consumer-0"}
    assert own.kit.pid(NAME, "router") == router
    assert_proved(moved["check"])
    assert moved["check"]["redis"]["keys_after"] == moved["check"]["store_path"]["stored_chunks"]
    assert moved["check"]["redis"]["keys_removed"] == moved["check"]["redis"]["keys_after"]
    assert sum(keys_of(node) for node in cluster) == 0, "wherever they lay"
    canaries = sum(canary_keys_of(node) for node in cluster)
    assert canaries == CANARY_CHUNKS
    # Of 48 keys each of three has one, but for once in a hundred million times.
    for _ in range(16):
        ask(own)
    held = [keys_of(node) for node in cluster]
    assert min(held) > 0, "each has its share"
    assert sum(held) == 16 * 3
    assert keys_of(tls) == before
    every = sum(held) + canaries
    assert own.kit.ok("status", "--name", NAME)["store"]["keys"] == every
    assert_password_is_private(own)

    ran = own.kit.run("down", "--name", NAME)
    assert ran.code == 0, ran
    assert f"{every} keys {PREFIX} stay in your Redis" in ran.stdout
    assert [keys_of(node) for node in cluster] == held
    down = own.kit.ok("down", "--volumes", "--name", NAME, "-f", str(own.spec))
    assert (down["was_up"], down["left"]["removed"], down["left"]["keys"]) == (
        False, True, every,
    )  # fmt: skip
    assert [keys_of(node) + canary_keys_of(node) for node in cluster] == [0, 0, 0]
