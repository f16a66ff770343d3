"""The measure of the check's power: its damage is what it says, and comes in time."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import redis

np = pytest.importorskip("numpy")

from bench.check_power import report  # noqa: E402
from bench.check_power.damage import (  # noqa: E402
    KINDS,
    NOTHING,
    Stored,
    as_floats,
    as_words,
)
from bench.check_power.layout import Kv, Layout, Shape, learn  # noqa: E402
from bench.check_power.server import replace_in_memory  # noqa: E402
from bench.check_power.trials import HEALTHY, Outcome, Record, Series, planned  # noqa: E402
from bench.check_power.vandal import Loot, vandal  # noqa: E402
from bench.redis_server import HOST, RedisServer  # noqa: E402

SHAPE = Shape(layers=3, blocks=4, heads=2, block_size=8, head_size=16)
# For each head, the words of its K, then of its V.
PLANES = SHAPE.layers, SHAPE.blocks, SHAPE.heads, 2, SHAPE.block_size * SHAPE.head_size
# Word → the word from which a number is 1 or more.
ONES = {np.uint16: 0x3F80, np.uint32: 0x3F80_0000}
CHUNKS = 3


class MadeUpEngine:
    """Stores a value for each token and place, the words of a block in an order of its own."""

    def __init__(self, *, mixes_tokens: bool = False, word: type = np.uint16) -> None:
        rng = np.random.default_rng(1)
        words = PLANES[-1]
        self.order = np.stack([rng.permutation(words), rng.permutation(words)])
        self.mixes_tokens = mixes_tokens
        self.word = word

    def kv(self, prompt: Sequence[int]) -> Kv:
        """Return `[K and V, layers, tokens, heads, head_size]`."""
        sizes = (2, SHAPE.layers, 1, SHAPE.heads, SHAPE.head_size)
        tokens = [np.random.default_rng(i + 300 * at) for at, i in enumerate(prompt)]
        parts = [one.integers(1, ONES[self.word], sizes, self.word) for one in tokens]
        return np.concatenate(parts, axis=2)

    def chunk_of(self, prompt: Sequence[int]) -> bytes:
        apart = self.kv(prompt).reshape(
            2, SHAPE.layers, SHAPE.blocks, SHAPE.block_size, SHAPE.heads, SHAPE.head_size
        )
        planes = apart.transpose(1, 2, 4, 0, 3, 5).reshape(PLANES)
        if self.mixes_tokens:
            planes = np.cumsum(planes, axis=-1, dtype=np.uint16)
        stored = np.stack([planes[:, :, :, part][..., self.order[part]] for part in (0, 1)], axis=3)
        return stored.tobytes()


def a_prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(97, 123), k=SHAPE.tokens)


@pytest.fixture(scope="module", params=ONES)
def engine(request: pytest.FixtureRequest) -> MadeUpEngine:
    return MadeUpEngine(word=request.param)


@pytest.fixture(scope="module")
def layout(engine: MadeUpEngine) -> Layout:
    return learn(engine.chunk_of, replace(SHAPE, word=engine.word))


def test_an_unknown_layout_is_learned(engine: MadeUpEngine, layout: Layout) -> None:
    prompt = a_prompt(1)
    kv, value = layout.opened(engine.chunk_of(prompt)), engine.chunk_of(prompt)
    assert layout.closed(kv) == value
    # In which order a token's own words lie is nobody's concern.
    assert (np.sort(kv, axis=-1) == np.sort(engine.kv(prompt), axis=-1)).all()


def test_k_of_all_heads_may_come_before_v(engine: MadeUpEngine) -> None:
    def k_first(prompt: Sequence[int]) -> bytes:
        planes = np.frombuffer(engine.chunk_of(prompt), engine.word).reshape(PLANES)
        return planes.swapaxes(2, 3).tobytes()

    other = learn(k_first, replace(SHAPE, heads_first=False, word=engine.word))
    prompt = a_prompt(1)
    value = k_first(prompt)
    kv = other.opened(value)
    assert value != engine.chunk_of(prompt) and other.closed(kv) == value
    assert (np.sort(kv, axis=-1) == np.sort(engine.kv(prompt), axis=-1)).all()


def test_a_layout_in_which_tokens_share_words_is_refused() -> None:
    with pytest.raises(ValueError, match="only that token's words"):
        learn(MadeUpEngine(mixes_tokens=True).chunk_of, SHAPE)


def damaged(
    kind: str, engine: MadeUpEngine, layout: Layout, seed: int
) -> tuple[Stored, dict[int, bytes]]:
    chunks = [engine.chunk_of(a_prompt(number)) for number in range(CHUNKS)]
    stored = Stored(chunks, engine.chunk_of([0] * SHAPE.tokens), layout)
    return stored, dict(KINDS[kind].damage(stored, random.Random(seed)))


# Kind → which of K and V change, how many tokens, and how many layers, of the one chunk.
ALL = SHAPE.tokens, SHAPE.layers
CHANGES = {
    "noise": ("KV", *ALL),
    "k-bit": ("K", 1, 1),
    "v-bit": ("V", 1, 1),
    "zero-layer": ("KV", SHAPE.tokens, 1),
    "two-rows-k": ("K", 2, SHAPE.layers),
    "two-rows-v": ("V", 2, SHAPE.layers),
    "two-rows-kv": ("KV", 2, SHAPE.layers),
    "stale-chunk": ("KV", *ALL),
    "planes": ("KV", *ALL),
    "heads": ("KV", *ALL),
    "token-major": ("KV", *ALL),
    "float16": ("KV", *ALL),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", CHANGES)
def test_each_kind_of_damage_changes_what_it_names(
    kind: str, seed: int, engine: MadeUpEngine, layout: Layout
) -> None:
    stored, changed = damaged(kind, engine, layout, seed)
    ((number, value),) = changed.items()
    differs = layout.opened(value) != layout.opened(stored.chunks[number])
    parts = "".join(name for name, part in zip("KV", differs, strict=True) if part.any())
    tokens = int(differs.any(axis=(0, 1, 3, 4)).sum())
    layers = int(differs.any(axis=(0, 2, 3, 4)).sum())
    assert (parts, tokens, layers) == CHANGES[kind]


@pytest.mark.parametrize("kind", ["rows-k", "rows-v", "rows-kv"])
def test_shuffled_rows_are_the_same_rows(kind: str, engine: MadeUpEngine, layout: Layout) -> None:
    stored, changed = damaged(kind, engine, layout, 1)
    ((number, value),) = changed.items()
    before, after = layout.opened(stored.chunks[number]), layout.opened(value)
    for name, one, two in zip("kv", before, after, strict=True):
        moved = (one != two).any(axis=(0, 2, 3)).sum()
        assert (moved > SHAPE.tokens / 2) == (name in kind.removeprefix("rows-"))
        assert (np.sort(one, axis=1) == np.sort(two, axis=1)).all()


def test_a_flip_makes_one_small_number_huge(engine: MadeUpEngine, layout: Layout) -> None:
    stored, changed = damaged("k-bit", engine, layout, 3)
    ((number, value),) = changed.items()
    before, after = (as_floats(layout.opened(v)) for v in (stored.chunks[number], value))
    (was,), (now,) = before[before != after], after[before != after]
    assert abs(was) < 2 <= abs(now)


def test_exchanging_damages_two_chunks(engine: MadeUpEngine, layout: Layout) -> None:
    stored, changed = damaged("chunks", engine, layout, 1)
    one, two = changed
    assert changed == {one: stored.chunks[two], two: stored.chunks[one]}


def test_every_kind_but_one_changes_something(engine: MadeUpEngine, layout: Layout) -> None:
    for kind in KINDS:
        stored, changed = damaged(kind, engine, layout, 1)
        assert bool(changed) == (kind != NOTHING), kind
        assert all(value != stored.chunks[number] for number, value in changed.items()), kind
        assert all(len(value) == len(stored.chunks[0]) for value in changed.values()), kind
        assert damaged(kind, engine, layout, 1)[1] == changed, "the seed says what is damaged"


def test_bfloat16_is_rounded_to_nearest() -> None:
    exact = np.array([1.0, -0.5, 3e38, 0.0, 2**-126], np.float32)
    rounded = as_floats(as_words(exact, np.uint16))
    assert (as_floats(as_words(exact * 1.0009765625, np.uint16)) == rounded).all()
    assert (np.abs(rounded - exact) <= np.abs(exact) / 256).all()
    assert (as_floats(as_words(exact, np.uint32)) == exact).all()


# The vandal


@pytest.fixture
def store(tmp_path: Path) -> Iterator[redis.Redis]:
    with RedisServer(tmp_path) as server:
        yield redis.Redis(HOST, server.port)


def put(store: redis.Redis, engine: MadeUpEngine, part: str) -> list[bytes]:
    keys = [f"model@{number}@{part}kv_bytes".encode() for number in range(CHUNKS)]
    for number, key in enumerate(keys):
        store.set(key, engine.chunk_of(a_prompt(number)))
    store.set(f"model@{part}metadata", b"as LMCache writes it after the bytes")
    return keys


def await_loot(loot: list[Loot]) -> None:
    until = time.monotonic() + 20
    while not loot:
        assert time.monotonic() < until, "nothing was damaged"
        time.sleep(0.01)


def test_one_chunk_is_damaged_once_all_are_stored(
    store: redis.Redis, engine: MadeUpEngine, layout: Layout
) -> None:
    others = put(store, engine, "other@")
    before = store.mget(others)
    foreign = engine.chunk_of(a_prompt(99))
    work = KINDS["stale-chunk"].damage, foreign, layout, random.Random(1)
    with vandal(store, "mine@", CHUNKS, work) as loot:
        keys = put(store, engine, "mine@")
        await_loot(loot)
    assert loot[0].in_time
    assert loot[0].first_chunk == before[0]
    assert sum(value == foreign for value in store.mget(keys)) == 1
    assert store.mget(others) == before


def test_damage_after_a_read_is_reported(
    store: redis.Redis, engine: MadeUpEngine, layout: Layout
) -> None:
    work = KINDS[NOTHING].damage, b"", layout, random.Random(1)
    with vandal(store, "mine@", CHUNKS, work) as loot:
        store.set("read before all of it is there", b"")
        store.get("read before all of it is there")
        put(store, engine, "mine@")
        await_loot(loot)
    assert not loot[0].in_time


def test_an_incomplete_prompt_is_not_damaged(
    store: redis.Redis, engine: MadeUpEngine, layout: Layout
) -> None:
    work = KINDS["noise"].damage, b"", layout, random.Random(1)
    with vandal(store, "mine@", CHUNKS + 1, work) as loot:
        keys = put(store, engine, "mine@")
    assert loot == []
    assert store.mget(keys) == [engine.chunk_of(a_prompt(number)) for number in range(CHUNKS)]


# The memory of LMCache's server

HOLDER = """
import sys
kept = sys.stdin.buffer.read(2**21)
print("kept", flush=True)
sys.stdin.buffer.read(1)
sys.stdout.buffer.write(kept)
"""


def test_chunks_are_replaced_in_the_memory_of_a_process() -> None:
    chunks = [random.Random(seed).randbytes(2**20) for seed in range(3)]
    with subprocess.Popen(
        (sys.executable, "-c", HOLDER), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        process.stdin.write(chunks[0] + chunks[1])
        process.stdin.flush()
        assert process.stdout.readline() == b"kept\n"
        with pytest.raises(RuntimeError, match="does not have a chunk"):
            replace_in_memory(process.pid, {chunks[0]: chunks[2], chunks[2]: chunks[0]})
        replace_in_memory(process.pid, {chunks[0]: chunks[1], chunks[1]: chunks[0]})
        kept, _ = process.communicate(b"x")
    assert kept == chunks[1] + chunks[0]


# What trials add up to


def outcomes(kind: str, noticed: int, missed: int) -> list[Outcome]:
    return [
        Outcome(kind, 1, number, ["differs"] if number < noticed else [], 0.1 * number, 1.0)
        for number in range(noticed + missed)
    ]


@pytest.mark.parametrize(
    ("kind", "noticed", "missed", "holds"),
    [
        ("noise", 100, 0, True),
        ("noise", 99, 1, True),
        ("noise", 98, 2, False),
        (HEALTHY, 0, 50, True),
        (HEALTHY, 1, 49, False),
        (NOTHING, 1, 99, False),
        ("two-rows-kv", 0, 100, True),
    ],
)
def test_a_row_holds_if_every_damage_is_noticed(
    kind: str, noticed: int, missed: int, holds: bool
) -> None:
    (row,) = report.rows(outcomes(kind, noticed, missed))
    assert row.holds is holds
    assert ("missed**" in report.table([row])) is not holds


def test_the_page_has_the_results() -> None:
    found = [*outcomes("noise", 3, 0), Outcome("noise", 1, 3, ["x"], math.inf, 1.0)]
    page = report.page([*found, *outcomes(HEALTHY, 0, 2)], seed=7)
    assert "--trials 4 --healthy 2 --seed 7" in page
    assert "| 4 of 4 |" in page and "| ∞ |" in page
    assert report.rows(found)[0].as_dict()["differences"] == [0.0, 0.1, 0.2, None]


def test_a_model_of_a_real_shape_has_its_own_table() -> None:
    tiny = outcomes("noise", 3, 0)
    page = report.page([*tiny, replace(outcomes(HEALTHY, 0, 2)[0], layers=8)], seed=7)
    first, second = page.split("## bfloat16 noise of a real shape")
    assert "| 3 of 3 |" in first and "--healthy 0 " in first
    assert "`--layers 8` of its 24" in second and "| 0 of 1 |" in second
    assert "real shape" not in report.page(tiny, seed=7)


@pytest.mark.parametrize(
    ("tier", "difference", "holds"),
    [("memory", math.inf, True), ("redis", 0.1, True), ("redis", 0.3, False)],
)
def test_a_value_that_a_checksum_refuses_changes_no_answer(
    tier: str, difference: float, holds: bool
) -> None:
    noticed = Outcome("noise", 1, 0, ["missing hits"], difference, 1.0, tier=tier)
    (row,) = report.rows([noticed])
    assert row.holds is holds


def test_a_checksum_detects_damage_that_no_answer_shows() -> None:
    unseen = [replace(one, tier="redis") for one in outcomes("two-rows-kv", 0, 3)]
    assert not report.rows(unseen)[0].holds


def test_each_tier_of_lmcaches_server_has_its_own_table() -> None:
    both = itertools.product(("memory", "redis"), ("bfloat16", "float32"))
    others = [("", "float32"), *both]
    ones = [replace(outcomes("noise", 1, 0)[0], tier=tier, dtype=dtype) for tier, dtype in others]
    first, *tables = report.page([*outcomes("noise", 3, 0), *ones], seed=7).split("## KV in ")
    assert "| 3 of 3 |" in first
    assert len(tables) == 4 and all("| 1 of 1 |" in one for one in tables)
    assert [("float32" in one, "bfloat16" in one) for one in tables] == 2 * [
        (False, True), (True, False),
    ]  # fmt: skip


def test_a_run_continues_where_it_stopped(tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    first, endless = outcomes("noise", 1, 0)[0], Outcome("heads", 1, 0, ["x"], math.inf, 1.0)
    record.add(first)
    record.add(endless)
    again = Record(tmp_path / "record")
    assert again.outcomes == [first, endless]
    assert again.has(Series(1), "noise", 0)
    others = Series(2), Series(1, layers=8), Series(1, tier="redis"), Series(1, dtype="float32")
    assert not any(again.has(other, "noise", 0) for other in others)
    assert not again.has(Series(1), "noise", 1)


def test_trials_without_damage_come_first_and_kinds_take_turns() -> None:
    assert list(planned(["a", NOTHING, "b"], 2, 1)) == [
        (HEALTHY, 0), (NOTHING, 0), (NOTHING, 1), ("a", 0), ("b", 0), ("a", 1), ("b", 1),
    ]  # fmt: skip
