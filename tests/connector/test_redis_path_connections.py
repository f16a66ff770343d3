"""Every way to a real Redis: log-ins, TLS, Unix sockets, Sentinel, Cluster."""

from __future__ import annotations

import threading
import time

import pytest
import redis
from pdkit_connector.errors import ConnectorError
from pdkit_connector.redis_path.servers import parse
from pdkit_connector.redis_path.settings import Limits
from redis.crc import key_slot
from redis_chunks import Warnings, client, loaded, payload, prompt, stored
from redis_kinds import address, node_id, state
from redis_servers import eventually

from bench.redis_server import free_port
from tests.connector import fair_clock

CHUNKS = prompt("chunk", 20)
KEYS = list(CHUNKS)
LIMITS = Limits(lookup_s=10, load_s=10, store_s=10)


def works(one, chunks=CHUNKS):
    keys = list(chunks)
    return (
        stored(one, chunks) == keys
        and one.lookups.held(keys) == len(keys)
        and loaded(one, keys) == list(chunks.values())
    )


def refused(one):
    """Use a Redis that lets nobody in: nothing raises; return the two warnings, one each way."""
    with Warnings() as told:
        for _ in range(3):
            assert stored(one, CHUNKS) == []
            assert one.lookups.held(KEYS) == 0
            assert loaded(one, KEYS) == []
    assert len(told) == 2
    return told


# Log-ins


def test_a_password_is_needed_and_quoted_characters_work(servers, make):
    server = servers.start("--requirepass", "p@ss/word")
    at = f"127.0.0.1:{server.port}"
    assert works(make(f"redis://:p%40ss%2Fword@{at}"))
    for url in (f"redis://:wrong@{at}", f"redis://{at}"):
        one = make(url)
        told = refused(one)
        assert one.counters.value("failures", kind="auth") > 0
        assert "wrong" not in str(told)
        with pytest.raises(Exception, match=r"(?i)auth|password"):
            one.lookups.ping()


def test_a_user_with_limited_keys_can_store_and_load(servers, make):
    server = servers.start()
    server.admin.acl_setuser(
        "kv", enabled=True, passwords=["+secret"], keys=["chunk:*"], categories=["+@all"]
    )
    assert works(make(f"redis://kv:secret@127.0.0.1:{server.port}"))


def test_a_user_who_may_not_store_can_load(servers, make):
    server = servers.start()
    server.admin.acl_setuser(
        "reader", enabled=True, passwords=["+secret"], keys=["*"], categories=["+@read"]
    )
    assert works(make(server.url))
    one = make(f"redis://reader:secret@127.0.0.1:{server.port}")
    with Warnings() as told:
        for _ in range(3):
            assert stored(one, CHUNKS) == []
            assert one.lookups.held(KEYS) == 20
            assert loaded(one, KEYS) == list(CHUNKS.values())
    assert len(told) == 1
    assert "NOPERM" in told[0]
    assert one.counters.value("failures", kind="noperm") > 0


def test_a_user_who_may_not_load_misses(servers, make):
    """What fails and what works take turns; that is told once as well."""
    server = servers.start()
    server.admin.acl_setuser(
        "looker",
        enabled=True,
        passwords=["+secret"],
        keys=["*"],
        commands=["+strlen", "+set"],
    )
    one = make(f"redis://looker:secret@127.0.0.1:{server.port}")
    with Warnings() as told:
        for _ in range(5):
            assert stored(one, CHUNKS) == KEYS
            eventually(lambda: one.lookups.held(KEYS) == 20, 2)
            assert loaded(one, KEYS) == []
    assert len(told) == 1


def test_the_database_of_the_url_is_used(servers, make):
    server = servers.start()
    one = make(f"{server.url}/3")
    assert works(one)
    keyspace = server.admin.info("keyspace")
    assert {name: (of["keys"], of["expires"]) for name, of in keyspace.items()} == {"db3": (20, 0)}
    assert make(server.url).lookups.held(KEYS) == 0
    assert make(f"{server.url}?db=3").lookups.held(KEYS) == 20


def test_a_unix_socket_works(servers, make, tmp_path):
    server = servers.start("--requirepass", "secret")
    assert works(make(f"unix://:secret@{server.socket}?db=2"))
    assert "db2" in server.admin.info("keyspace")
    refused(make(f"unix://{tmp_path}/nobody.sock"))


# TLS


def test_tls_needs_the_right_authority(servers, make, tls, certificates):
    options, arguments = tls
    server = servers.start(*options, "--requirepass", "secret", tls=arguments)
    at = f"127.0.0.1:{server.port}"
    one = make(f"rediss://:secret@{at}/1?ssl_ca_certs={certificates}/ca.pem")
    assert works(one)
    large = prompt("large", 3, 5_000_000)
    assert works(one, large)  # many records
    server.kill()
    server.start()
    assert works(one)
    for url in (
        f"rediss://:secret@{at}?ssl_ca_certs={certificates}/other.pem",
        f"rediss://:secret@{at}",
        f"redis://:secret@{at}",
    ):
        refused(make(url))
    assert not server.admin.info("keyspace").get("db0")


def test_a_tls_connection_that_stops_often_loses_no_bytes(servers, tls, certificates):
    """Each time that a little gets through, the limit must not begin anew."""
    options, arguments = tls
    server = servers.start(*options, tls=arguments)
    url = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={certificates}/ca.pem"
    one = client(url, Limits(lookup_s=0.3, load_s=0.5, store_s=0.5))
    eventually(lambda: works(one), 10)
    large = prompt("large", 2, 30_000_000)
    ended = threading.Event()

    def flap():
        while not ended.wait(0.01):
            server.stop_answering()
            time.sleep(0.2)
            server.answer_again()

    server.stop_answering()
    thread = threading.Thread(target=flap)
    thread.start()
    try:
        for use in (lambda: stored(one, large) == [], lambda: loaded(one, KEYS) is not None):
            began = fair_clock.now()
            assert use()
            assert fair_clock.now() - began < 1.0
    finally:
        ended.set()
        thread.join()
    eventually(lambda: works(one), 20)
    one.close()


# Sentinel


def is_master(node):
    try:
        return node.admin.info("replication")["role"] == "master"
    except redis.ConnectionError:
        return False  # its connections are cut when it changes


def fails_over(watch):
    try:
        return watch.admin.execute_command("SENTINEL FAILOVER", "main")
    except redis.ResponseError as error:
        assert "NOGOODSLAVE" in str(error)  # it does not know the replica well yet
        return False


def test_the_master_of_a_sentinel_is_used(sentinel, make):
    master, replica, watch = sentinel
    nobody = free_port()
    one = make(f"redis-sentinel://127.0.0.1:{nobody},127.0.0.1:{watch.port}/main")
    assert works(one)
    assert master.admin.dbsize() == 20
    eventually(lambda: replica.admin.dbsize() == 20, 5)

    eventually(lambda: fails_over(watch), 15)
    eventually(lambda: is_master(replica), 90)
    # The old master may go on as if nothing had happened for ten seconds, and then forget it all.
    more = prompt("more", 20)
    eventually(lambda: works(one, more) and replica.admin.exists(*more) == 20, 5)
    assert loaded(one, KEYS) == list(CHUNKS.values())


def test_a_sentinels_new_master_is_used(sentinel, make):
    master, replica, watch = sentinel
    one = make(f"redis-sentinel://127.0.0.1:{watch.port}/main")
    assert works(one)
    eventually(lambda: replica.admin.dbsize() == 20, 5)
    master.kill()
    assert stored(one, CHUNKS) == []
    eventually(lambda: is_master(replica), 90)
    eventually(lambda: works(one), 5)


def test_a_sentinel_that_does_not_know_the_master_is_refused(sentinel, make):
    refused(make(f"redis-sentinel://127.0.0.1:{sentinel[2].port}/other"))


def test_sentinel_and_master_have_their_own_passwords(servers, make):
    master = servers.start("--requirepass", "secret")
    watch = servers.start(
        "--sentinel",
        "--requirepass",
        "sentinels",
        config=f"sentinel monitor main 127.0.0.1 {master.port} 1\nsentinel auth-pass main secret\n",
    )
    eventually(lambda: watch.admin.sentinel_master("main")["is_master"], 10)
    at = f"127.0.0.1:{watch.port}/main"
    assert works(make(f"redis-sentinel://:secret@{at}?sentinel_password=sentinels&db=1"))
    assert "db1" in master.admin.info("keyspace")
    refused(make(f"redis-sentinel://:secret@{at}"))


# Cluster


def test_chunks_are_spread_over_a_cluster(cluster, make):
    first, second, third, replica = cluster
    one = make(address(first))
    assert works(one)
    sizes = [node.admin.dbsize() for node in (first, second, third)]
    assert sum(sizes) == 20
    assert min(sizes) > 0

    # A slot moves while nobody has a key in it, and the client follows.
    moved = next(k for i in range(9999) if key_slot(k := f"moved:{i}".encode()) < 5461)
    for node in (third, second, first):
        node.admin.execute_command("CLUSTER SETSLOT", key_slot(moved), "NODE", node_id(third))
    chunk = {moved: payload(moved)}
    assert works(one, chunk)
    assert third.admin.execute_command("STRLEN", moved) > 0
    assert one.counters.value("failures") == 0
    assert loaded(one, [*KEYS, moved]) == [*CHUNKS.values(), payload(moved)]

    # A slot that is on its way hurts none but its own keys.
    going = next(k for k in KEYS if 5461 <= key_slot(k) < 10923)
    second.admin.execute_command("CLUSTER SETSLOT", key_slot(going), "MIGRATING", node_id(third))
    second.admin.execute_command("DEL", going)
    assert one.lookups.held(KEYS) == loaded_count(one) == KEYS.index(going)
    assert stored(one, CHUNKS) == [key for key in KEYS if key != going]
    assert one.counters.value("chunks", result="paused") == 0
    second.admin.execute_command("CLUSTER SETSLOT", key_slot(going), "STABLE")
    assert works(one)

    # A server dies, and its replica takes over.
    eventually(lambda: first.admin.dbsize() == replica.admin.dbsize() > 0, 5)
    first.kill()
    missing = next(i for i, key in enumerate(KEYS) if key_slot(key) < 5461)
    assert loaded_count(one) <= missing
    replica.admin.execute_command("CLUSTER FAILOVER", "TAKEOVER")
    eventually(lambda: all(state(node) == "ok" for node in (second, third, replica)), 20)
    eventually(lambda: loaded(one, KEYS) == list(CHUNKS.values()), 5)
    assert works(one)


def loaded_count(one):
    return len(loaded(one, KEYS))


# Addresses


@pytest.mark.parametrize(
    "url",
    [
        "http://host:1",
        "host:6379",
        "redis+cluster://host",
        "unix-cluster:///path",
        "redis://:pa/ss@host:6379",
        "redis://:secret@host:port",
        "redis://host?db=first",
        "redis://host?no_such_option=1",
        "redis-cluster://:secret@",
        "redis-cluster://user:sec/ret@host",
        "redis-sentinel://:secret@host:1",
        "rediss://host?ssl_cert_reqs=secret",
    ],
)
def test_invalid_addresses_are_refused_without_showing_the_password(url):
    with pytest.raises(ConnectorError) as raised:
        client(url)
    for part in ("secret", "sec", "ret", "pa", "ss@"):
        assert part not in str(raised.value).replace("password", "").replace("part", "")


def test_addresses_are_parsed_without_showing_passwords():
    several = parse("redis-cluster://u:p%40@[::1]:1,two")
    assert several.nodes == (("::1", 1), ("two", 6379))
    assert several.options["password"] == "p@"
    assert parse("redis-sentinel://one,two:2/main").nodes == (("one", 26379), ("two", 2))
    secure = parse("rediss-sentinel://one/main?ssl_ca_certs=/ca&sentinel_password=s")
    assert secure.sentinel_options == {"ssl_ca_certs": "/ca", "password": "s"}
    assert "p@" not in repr(several)
    assert "'s'" not in repr(secure)


def test_a_client_that_connects_to_nothing_has_no_threads_left_after_close():
    before = threading.active_count()
    client("redis://127.0.0.1:1").close()
    assert threading.active_count() == before
