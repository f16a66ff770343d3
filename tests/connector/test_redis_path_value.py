"""What a value in Redis is made of: only what was stored for the reader is taken."""

from __future__ import annotations

import sys

import pytest
from pdkit_connector.errors import ConnectorError
from pdkit_connector.redis_path.value import HEADER_BYTES, BadValue, Codec, Header, digest

CODEC = Codec("a layout")
KEY = b"model@0@0123"
PAYLOAD = bytes(range(64))


def value(codec: Codec = CODEC, key: bytes = KEY, payload: bytes = PAYLOAD) -> bytes:
    fields = Header(
        "bfloat16", (2, 1, len(payload) // 4), 3, len(payload), codec.layout, digest(key)
    )
    return codec.header(fields, payload) + payload


def read(whole: bytes, codec: Codec = CODEC, key: bytes = KEY) -> Header:
    """Do with a value what a load does."""
    if len(whole) < HEADER_BYTES:
        raise BadValue("corrupt", "short")
    fields, check = codec.parse(whole[:HEADER_BYTES], key)
    check.update(whole[HEADER_BYTES : HEADER_BYTES + 10])
    check.update(memoryview(whole)[HEADER_BYTES + 10 :])
    check.require()
    return fields


def refusal(whole: bytes, codec: Codec = CODEC, key: bytes = KEY) -> str:
    with pytest.raises(BadValue) as raised:
        read(whole, codec, key)
    return raised.value.kind


@pytest.fixture
def without(monkeypatch):
    """Make libraries look as if they were not installed."""

    def hide(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


def codec_of(algorithm: str) -> Codec:
    return Codec("a layout", algorithm, b"secret" if algorithm.endswith("-mac") else b"")


ALGORITHMS = ["xxh3", "blake3", "blake3-mac", "blake2b-mac"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_value_is_read_as_it_was_written(algorithm):
    codec = codec_of(algorithm)
    fields = read(value(codec), codec)
    assert fields == Header("bfloat16", (2, 1, 16), 3, 64, codec.layout, digest(KEY))
    assert len(value(codec)) == HEADER_BYTES + len(PAYLOAD) == 192


def test_readers_accept_either_checksum():
    assert read(value(Codec("a layout", "blake3")), Codec("a layout", "xxh3"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_flipped_bit_is_refused(algorithm):
    codec = codec_of(algorithm)
    whole = value(codec)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        assert refusal(bytes(flipped), codec) in ("corrupt", "foreign"), bit


def test_header_that_is_damaged_is_refused_before_memory_is_taken():
    whole = value()
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(whole[:HEADER_BYTES])
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadValue):
            CODEC.parse(bytes(flipped), KEY)


def test_every_shorter_and_longer_value_is_refused():
    whole = value()
    for length in range(len(whole)):
        assert refusal(whole[:length]) == "corrupt"
    for extra in (1, 7, 64):
        assert refusal(whole + bytes(extra)) == "corrupt"
        assert refusal(whole + whole[-extra:]) == "corrupt"


def test_swapped_values_are_refused():
    other = b"model@0@4567"
    assert refusal(value(key=other)) == "foreign"
    assert refusal(value(), key=other) == "foreign"


def test_swapped_payloads_are_refused():
    mine, other = value(), value(payload=bytes(64))
    assert refusal(mine[:HEADER_BYTES] + other[HEADER_BYTES:]) == "corrupt"


def test_value_of_another_layout_is_refused():
    assert refusal(value(Codec("another layout"))) == "foreign"


def test_value_of_another_format_version_is_refused():
    whole = bytearray(value())
    whole[8:10] = (2).to_bytes(2, "little")
    assert refusal(bytes(whole)) == "foreign"
    assert refusal(b"somebody else's" + bytes(200)) == "foreign"


def test_unknown_checksum_is_refused():
    whole = bytearray(value())
    whole[10] = 77
    assert refusal(bytes(whole)) == "foreign"


def test_blake3_is_used_if_xxhash_is_missing(without):
    with_both = value(Codec("a layout", "xxh3"))
    without("xxhash")
    codec = Codec("a layout")
    assert codec.algorithm == "blake3"
    assert read(value(codec), codec)
    assert refusal(with_both, codec) == "foreign"


def test_xxhash_is_first_choice():
    assert CODEC.algorithm == "xxh3"


def test_a_missing_checksum_says_what_to_install(without):
    without("xxhash", "blake3")
    with pytest.raises(ConnectorError, match="pip install xxhash"):
        Codec("a layout")


def test_named_checksum_that_is_missing_says_so(without):
    without("blake3")
    with pytest.raises(ConnectorError, match="blake3"):
        Codec("a layout", "blake3")


@pytest.mark.parametrize(
    "fields",
    [
        Header("bfloat16", (1,) * 7, 1, 64, CODEC.layout, digest(KEY)),
        Header("a_type_of_very_long_name", (64,), 1, 64, CODEC.layout, digest(KEY)),
        Header("uint8", (65,), 1, 65, CODEC.layout, digest(KEY)),
    ],
)
def test_values_that_no_header_can_describe_are_not_stored(fields):
    with pytest.raises(BadValue) as raised:
        CODEC.header(fields, PAYLOAD)
    assert raised.value.kind == "unfit"


@pytest.mark.parametrize("algorithm", ["xxh3", "blake3", "blake3-mac", "blake2b-mac"])
def test_a_value_cannot_be_forged_without_the_secret(algorithm):
    """The forger knows the code, the layout and the key, which Redis shows."""
    mine = Codec("a layout", secret=b"secret")
    forger = Codec("a layout", algorithm, b"" if algorithm in ("xxh3", "blake3") else b"guessed")
    assert read(value(mine), mine)
    forger.layout = mine.layout
    assert refusal(value(forger), mine) in ("corrupt", "foreign")


def test_a_payload_cannot_be_exchanged_for_another_signed_one():
    codec = Codec("a layout", secret=b"secret")
    one, other = value(codec), value(codec, key=b"model@0@4567", payload=PAYLOAD[::-1])
    assert refusal(one[:HEADER_BYTES] + other[HEADER_BYTES:], codec) == "corrupt"
    assert refusal(other, codec) == "foreign"


def test_each_secret_has_its_own_keys():
    """Else values of an old secret would be found at each lookup and refused at each load."""
    layouts = {Codec("a layout", secret=secret).layout for secret in (b"", b"one", b"two")}
    assert len(layouts) == 3
    assert Codec("a layout", secret=b"one").layout == Codec("a layout", secret=b"one").layout


def test_a_mac_works_without_blake3(without):
    with_it = value(Codec("a layout", secret=b"secret"))
    without("blake3")
    codec = Codec("a layout", secret=b"secret")
    assert codec.algorithm == "blake2b-mac"
    assert read(value(codec), codec)
    assert refusal(with_it, codec) == "foreign"


def test_readers_accept_either_mac():
    slow = Codec("a layout", "blake2b-mac", b"secret")
    fast = Codec("a layout", secret=b"secret")
    assert fast.algorithm == "blake3-mac"
    assert read(value(slow), fast)


def test_an_empty_payload_is_read():
    assert read(value(payload=b"")).payload_bytes == 0
