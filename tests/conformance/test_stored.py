"""Stored frames: published CRC vectors, a header built by hand, and a flip of everything."""

from __future__ import annotations

import random
import struct
from array import array

import pytest

from attnix.drivers._stored import ffi, lib
from attnix.drivers.stored import Failure, Gates, Reason, StoredFormat, copy_crc32c, crc32c, errno_of, errors, explain
from attnix.kernel.errors import E
from attnix.kernel.tag import GATE_FAILED, GATES, HEADER_BYTES, TAG_HEAD_BYTES, Tag, gate_value

BLOCK_TOKENS = 4
LAYERS = 3
LAYER_BYTES = 1000  # so that the payload needs padding
IDENTITY = bytes(range(16))
FORMAT = StoredFormat(LAYERS * LAYER_BYTES, LAYERS, BLOCK_TOKENS, IDENTITY)
WAYS = {"table": 0, "instruction": 1, "folding": 2}

# RFC 3720, appendix B.4: the CRC as it goes on the wire is these bytes, least significant first.
RFC3720 = [
    (bytes(32), "aa36918a"),
    (b"\xff" * 32, "43aba862"),
    (bytes(range(32)), "4e79dd46"),
    (bytes(range(31, -1, -1)), "5cdb3f11"),
    (
        bytes.fromhex(
            "01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"
        ),
        "563a96d9",
    ),
]


def bitwise_crc32c(data: bytes) -> int:
    """The definition: one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def tag(key: int, **changes: object) -> bytes:
    base = Tag(bytes([key]) * 16, b"p" * 16, b"r" * 16, 8, 4, 0, b"default", array("i", [5, 6, 7, key]).tobytes())
    return base._replace(**changes).pack(BLOCK_TOKENS)  # type: ignore[arg-type]


def pairs(*items: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<ii", *item) for item in items)


def sealed(n: int = 1) -> tuple[bytearray, bytearray, bytes]:
    bare = bytearray(random.Random(1).randbytes(n * FORMAT.frame_bytes))
    stored = bytearray(b"\xee" * (n * FORMAT.stored_bytes))
    tags = b"".join(tag(i) for i in range(n))
    assert FORMAT.seal(bare, stored, pairs(*((i, i) for i in range(n))), tags) == []
    return bare, stored, tags


# -- CRC-32C ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("data", "wire"), RFC3720)
def test_published_vectors(data: bytes, wire: str, way: str) -> None:
    assert lib.ax_crc32c_with(WAYS[way], 0, data, len(data)) == int.from_bytes(bytes.fromhex(wire), "little")


def test_the_check_value_of_the_catalogue() -> None:
    """CRC RevEng's catalogue: CRC-32/ISCSI check = 0xe3069283."""
    assert crc32c(b"123456789") == 0xE3069283
    assert bitwise_crc32c(b"123456789") == 0xE3069283  # what the longer tests compare with is right, too


@pytest.mark.parametrize("way", WAYS)
def test_every_length_and_alignment_is_the_definition(way: str) -> None:
    rng = random.Random(2)
    source = bytearray(rng.randbytes(9000))
    view = ffi.from_buffer("char[]", source)
    to = bytearray(9100)
    out = ffi.from_buffer("char[]", to, require_writable=True)
    lengths = [*range(70), 127, 255, 256, 257, 383, 384, 385, 511, 512, 513, 767, 768, 1023, 3071, 3072, 3080, 8191]
    for length in lengths:
        start, shift = rng.randrange(64), rng.randrange(64)
        data = bytes(source[start : start + length])
        expected = bitwise_crc32c(data)
        assert lib.ax_crc32c_with(WAYS[way], 0, view + start, length) == expected, length
        to[:] = b"\xaa" * len(to)
        assert lib.ax_copy_crc32c_with(WAYS[way], 0, out + shift, view + start, length) == expected, length
        assert to[shift : shift + length] == data
        assert to[:shift] == b"\xaa" * shift and to[shift + length :] == b"\xaa" * (len(to) - shift - length)


def test_a_checksum_can_go_on() -> None:
    data = random.Random(3).randbytes(5000)
    for cut in (0, 1, 511, 2049, 5000):
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)
        to = bytearray(len(data))
        assert copy_crc32c(to, data[cut:], crc32c(data[:cut])) == crc32c(data)
    with pytest.raises(ValueError, match="do not fit"):
        copy_crc32c(bytearray(4), b"12345")


# -- the header ---------------------------------------------------------------------------------------------------


def test_a_header_is_what_kernel_tag_says() -> None:
    """Built a second time with struct alone, from the table in kernel/tag.py."""
    bare, stored, tags = sealed()
    checksums = [bitwise_crc32c(bytes(bare[i * LAYER_BYTES : (i + 1) * LAYER_BYTES])) for i in range(LAYERS)]
    header = bytearray(4096)
    struct.pack_into("<8sIIQII16s", header, 0, b"ATNXBLK1", 1, 0, 0, 3000, 3, IDENTITY)
    header[64 : 64 + len(tags)] = tags
    struct.pack_into("<3I", header, 2048, *checksums)
    struct.pack_into("<I", header, 12, bitwise_crc32c(bytes(header)))
    assert stored[:4096] == header == FORMAT.encode_header(tags, checksums)
    assert stored[4096 : 4096 + 3000] == bare and not any(stored[4096 + 3000 :])
    assert FORMAT.header_tag(stored) == tags
    assert len(stored) == FORMAT.stored_bytes == 8192


def test_a_stamped_header_has_the_generation_and_is_valid() -> None:
    _, stored, tags = sealed()
    lib.ax_header_stamp(ffi.from_buffer("char[]", stored), 77)
    assert struct.unpack_from("<Q", stored, 16) == (77,)
    assert FORMAT.check_header(stored, tags) == Reason.OK
    assert stored[:4096] == FORMAT.encode_header(tags, struct.unpack_from("<3I", stored, 2048), 77)


@pytest.mark.parametrize(
    ("offset", "packed", "reason"),
    [
        (0, b"ATNXBLK2", Reason.MAGIC),
        (8, struct.pack("<I", 2), Reason.VERSION),
        (24, struct.pack("<I", 2999), Reason.SHAPE),
        (28, struct.pack("<I", 4), Reason.SHAPE),
        (32, bytes(16), Reason.IDENTITY),
        (64, tag(9), Reason.KEY),
        (64, tag(0, parent=b"q" * 16), Reason.TAG),
        (64, tag(0, root=b"q" * 16), Reason.TAG),
        (64, tag(0, depth=12), Reason.TAG),
        (64, tag(0, ntokens=3), Reason.TAG),
        (64, tag(0, flags=1), Reason.TAG),
        (64, tag(0, domain=b"other"), Reason.TAG),
        (64, tag(0, tokens=array("i", [5, 6, 8, 0]).tobytes()), Reason.TAG),
    ],
)
def test_each_field_is_compared_even_under_a_right_checksum(offset: int, packed: bytes, reason: Reason) -> None:
    bare, stored, tags = sealed()
    stored[offset : offset + len(packed)] = packed
    assert FORMAT.check_header(stored) in (Reason.MAGIC, Reason.HEADER)
    stored[12:16] = bytes(4)
    stored[12:16] = struct.pack("<I", crc32c(stored[:HEADER_BYTES]))
    assert FORMAT.check_header(stored, tags) == reason
    assert FORMAT.unseal(bare, stored, pairs((0, 0)), tags) == [Failure(0, reason)]
    assert FORMAT.verify(stored, struct.pack("<i", 0), tags) == [Failure(0, reason)]


def test_every_flipped_bit_of_a_header_is_found() -> None:
    _, stored, tags = sealed()
    for bit in range(8 * HEADER_BYTES):
        stored[bit // 8] ^= 1 << bit % 8
        assert FORMAT.check_header(stored, tags) in (Reason.MAGIC, Reason.HEADER), bit
        stored[bit // 8] ^= 1 << bit % 8
    assert FORMAT.check_header(stored, tags) == Reason.OK


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_flipped_bit_names_its_layer(layer: int) -> None:
    bare, stored, tags = sealed(2)
    for at in (0, LAYER_BYTES // 2, LAYER_BYTES - 1):
        where = FORMAT.stored_bytes + HEADER_BYTES + layer * LAYER_BYTES + at
        stored[where] ^= 0x10
        expected = [Failure(1, Reason.LAYER | layer << 8)]
        assert FORMAT.unseal(bytearray(len(bare)), stored, pairs((0, 0), (1, 1)), tags) == expected
        assert FORMAT.verify(stored, struct.pack("<2i", 0, 1), tags) == expected
        assert f"layer {layer}" in explain(expected[0].code)
        stored[where] ^= 0x10


# -- batches ------------------------------------------------------------------------------------------------------


def test_a_batch_round_trips_in_any_order_of_frames() -> None:
    n = 5
    bare = bytearray(random.Random(4).randbytes(n * FORMAT.frame_bytes))
    stored = bytearray(n * FORMAT.stored_bytes)
    order = pairs((0, 3), (4, 0), (2, 2), (1, 4))
    tags = b"".join(tag(i) for i in range(4))
    assert FORMAT.seal(bare, stored, order, tags) == []
    assert not any(stored[FORMAT.stored_bytes : 2 * FORMAT.stored_bytes]), "a frame that no pair names was written"
    back = bytearray(len(bare))
    assert FORMAT.unseal(back, stored, order, tags) == []
    size = FORMAT.frame_bytes
    for index in (0, 1, 2, 4):
        assert back[index * size : (index + 1) * size] == bare[index * size : (index + 1) * size]
    assert not any(back[3 * size : 4 * size])
    assert FORMAT.verify(stored, struct.pack("<4i", 3, 0, 2, 4), tags) == []
    assert FORMAT.verify(stored, struct.pack("<i", 1)) == [Failure(0, Reason.MAGIC)]


def test_items_fail_one_by_one() -> None:
    bare, stored, tags = sealed(3)
    wrong = pairs((0, 0), (3, 1), (2, 3), (1, -1))
    four = tags + tag(0)
    before = bytes(stored)
    assert FORMAT.seal(bare, stored, wrong, four) == [Failure(i, Reason.RANGE) for i in (1, 2, 3)]
    assert stored == before
    back = bytearray(len(bare))
    failures = FORMAT.unseal(back, stored, wrong, four)
    assert errors(failures) == [(i, E.EINVAL) for i in (1, 2, 3)]
    assert back[: FORMAT.frame_bytes] == bare[: FORMAT.frame_bytes] and not any(back[FORMAT.frame_bytes :])
    assert errno_of(Reason.LAYER | 7 << 8) == E.ECORRUPT and errno_of(0) == 0
    assert {explain(reason) for reason in Reason} and len({explain(reason) for reason in Reason}) == len(Reason)
    with pytest.raises(ValueError, match="bytes of tags"):
        FORMAT.seal(bare, stored, pairs((0, 0)), four)


def test_a_sealed_frame_replaces_what_was_there() -> None:
    _, stored, tags = sealed(2)
    assert FORMAT.seal(bytearray(FORMAT.frame_bytes), stored, pairs((0, 0)), tag(3)) == []
    assert FORMAT.verify(stored, struct.pack("<i", 0), tags[: FORMAT.tag_bytes]) == [Failure(0, Reason.KEY)]


def test_a_gate_follows_the_layers_and_never_goes_back() -> None:
    bare, stored, tags = sealed(2)
    memory = bytearray(8 * GATES)
    gates = Gates(memory)
    both = pairs((0, 0), (1, 1))
    back = bytearray(len(bare))
    assert FORMAT.unseal_gated(back, stored, both, tags, gates, 5, 9, group=2) == []
    assert back == bare and gates.load(5) == gate_value(9, LAYERS)
    gates.store(5, 8, LAYERS)  # a late writer
    assert gates.load(5) == gate_value(9, LAYERS)
    stored[HEADER_BYTES + LAYER_BYTES] ^= 1
    back = bytearray(len(bare))
    failures = FORMAT.unseal_gated(back, stored, both, tags, gates, 5, 10)
    assert failures == [Failure(0, Reason.LAYER | 1 << 8)]
    assert gates.load(5) == gate_value(10, GATE_FAILED)
    assert back[FORMAT.frame_bytes :] == bare[FORMAT.frame_bytes :], "the healthy item is completed all the same"
    assert [i for i in range(GATES) if gates.load(i)] == [5]
    with pytest.raises(ValueError, match="gate"):
        gates.pointer(GATES)
    with pytest.raises(ValueError, match="gates"):
        Gates(bytearray(80))


@pytest.mark.parametrize(
    ("frame_bytes", "layers", "block_tokens", "identity"),
    [
        (1000, 3, 4, IDENTITY),
        (0, 1, 4, IDENTITY),
        (513 * 8, 513, 4, IDENTITY),
        (1000, 1, 4, b"short"),
        (1000, 1, (2048 - 64 - TAG_HEAD_BYTES) // 4 + 1, IDENTITY),
    ],
)
def test_formats_that_cannot_be(frame_bytes: int, layers: int, block_tokens: int, identity: bytes) -> None:
    with pytest.raises(ValueError):
        StoredFormat(frame_bytes, layers, block_tokens, identity)
