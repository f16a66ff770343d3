"""Kinds of Redis beside a single server without TLS: certificates, Sentinel, Cluster."""

from __future__ import annotations

import datetime
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis_servers import eventually

from bench.redis_server import free_port


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Return a folder with ca.pem, other.pem (of another authority), server.pem and server.key."""
    folder = tmp_path_factory.mktemp("certificates")
    authority, signer = _certificate("authority")
    other, _ = _certificate("another authority")
    server, key = _certificate("127.0.0.1", (authority, signer))
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(authority.public_bytes(pem))
    (folder / "other.pem").write_bytes(other.public_bytes(pem))
    (folder / "server.pem").write_bytes(server.public_bytes(pem))
    (folder / "server.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


def _certificate(name, by=None):
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by[0].subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
    )
    if by:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return made.sign(by[1] if by else key, hashes.SHA256()), key


@pytest.fixture
def tls(certificates):
    """Return options of redis-server's and arguments of redis-py's."""
    options = ("--tls-cert-file", f"{certificates}/server.pem")
    options += ("--tls-key-file", f"{certificates}/server.key")
    options += ("--tls-ca-cert-file", f"{certificates}/ca.pem", "--tls-auth-clients", "no")
    return options, {"ssl": True, "ssl_ca_certs": f"{certificates}/ca.pem"}


@pytest.fixture
def sentinel(servers):
    """Return a master, its replica, and the Sentinel that watches them."""
    master = servers.start("--repl-diskless-sync-delay", "0")
    replica = servers.start("--replicaof", "127.0.0.1", str(master.port))
    eventually(lambda: replica.admin.info("replication")["master_link_status"] == "up", 10)
    watch = servers.start(
        "--sentinel",
        config=f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
        "sentinel auth-user main admin\nsentinel auth-pass main admin-password\n"
        "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n",
    )
    eventually(lambda: watch.admin.sentinel_slaves("main"), 15)
    return master, replica, watch


@pytest.fixture
def cluster(servers):
    """Return three masters that share the slots, and a replica of the first."""
    nodes = [
        servers.start(
            "--cluster-enabled",
            "yes",
            "--cluster-port",
            str(free_port()),
            "--cluster-node-timeout",
            "5000",
        )
        for _ in range(4)
    ]
    first, second, third, replica = nodes
    for node, (start, end) in zip(nodes, ((0, 5460), (5461, 10922), (10923, 16383)), strict=False):
        node.admin.execute_command("CLUSTER ADDSLOTSRANGE", start, end)
    for node in (second, third, replica):
        bus = node.admin.config_get("cluster-port")["cluster-port"]
        first.admin.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
    first_id = node_id(first)
    replica.admin.config_set("masteruser", "admin")
    replica.admin.config_set("masterauth", "admin-password")
    eventually(lambda: all(known(node) == 4 for node in nodes), 20)
    replica.admin.execute_command("CLUSTER REPLICATE", first_id)
    eventually(lambda: all(state(node) == "ok" for node in nodes), 20)
    eventually(lambda: replica.admin.info("replication")["master_link_status"] == "up", 20)
    return nodes


def node_id(node):
    return node.admin.execute_command("CLUSTER MYID").decode()


def info(node):
    said = node.admin.execute_command("CLUSTER INFO")
    return (
        said if isinstance(said, dict) else dict(line.split(":") for line in said.decode().split())
    )


def state(node):
    return info(node)["cluster_state"]


def known(node):
    return int(info(node)["cluster_known_nodes"])


def address(*nodes):
    return "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
