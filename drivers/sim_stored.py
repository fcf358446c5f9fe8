"""Stored frames in plain Python, for simulated devices: the layout of kernel/tag.py a second time, and slowly.

`drivers/stored.py` is the one that drivers use.  Two implementations of one layout check each other.
"""

from __future__ import annotations

import functools
import struct
from typing import Final

from attnix.kernel.tag import CHECKSUM_OFFSET, HEADER_BYTES, MAGIC, STORED_VERSION, TAG_OFFSET, stored_bytes, tag_bytes

_HEAD: Final = struct.Struct("<8sIIQII16s16x")
_CRC_AT: Final = 12


@functools.lru_cache(maxsize=4096)  # a frame is looked at again wherever it goes, and a simulation has thousands
def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), a byte at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE: Final = [_table_entry(byte) for byte in range(256)]


class Sealer:
    """Makes and checks stored frames of one geometry.

    frame_bytes   of the bare KV, a multiple of layers
    identity      16 bytes
    """

    def __init__(self, frame_bytes: int, layers: int, block_tokens: int, identity: bytes) -> None:
        if frame_bytes % layers or len(identity) != 16:
            raise ValueError(f"{frame_bytes} bytes in {layers} layers under an identity of {len(identity)} bytes")
        self.frame_bytes = frame_bytes
        self.layers = layers
        self.identity = identity
        self.tag_bytes = tag_bytes(block_tokens)
        self.stored_bytes = stored_bytes(frame_bytes)

    def seal(self, bare: bytes | memoryview, tag: bytes, generation: int = 0) -> bytes:
        """The stored frame of a block."""
        header = bytearray(HEADER_BYTES)
        _HEAD.pack_into(header, 0, MAGIC, STORED_VERSION, 0, generation, self.frame_bytes, self.layers, self.identity)
        header[TAG_OFFSET : TAG_OFFSET + self.tag_bytes] = tag
        struct.pack_into(f"<{self.layers}I", header, CHECKSUM_OFFSET, *self._checksums(bare))
        struct.pack_into("<I", header, _CRC_AT, crc32c(bytes(header)))
        return bytes(header) + bytes(bare).ljust(self.stored_bytes - HEADER_BYTES, b"\0")

    def payload(self, stored: bytes | bytearray | memoryview) -> bytes:
        """The bare KV of a stored frame."""
        return bytes(stored[HEADER_BYTES : HEADER_BYTES + self.frame_bytes])

    def matches(self, stored: bytes | bytearray | memoryview, tag: bytes) -> bool:
        """Whether a frame is sound, of our identity, and the block that `tag` names."""
        if not self.is_header_sound(stored) or bytes(stored[TAG_OFFSET : TAG_OFFSET + self.tag_bytes]) != tag:
            return False
        return self._checksums(self.payload(stored)) == struct.unpack_from(f"<{self.layers}I", stored, CHECKSUM_OFFSET)

    def is_header_sound(self, stored: bytes | bytearray | memoryview) -> bool:
        header = bytearray(stored[:HEADER_BYTES])
        magic, version, crc, _, payload, layers, identity = _HEAD.unpack_from(header)
        struct.pack_into("<I", header, _CRC_AT, 0)
        said = (magic, version, payload, layers, identity)
        return said == (MAGIC, STORED_VERSION, self.frame_bytes, self.layers, self.identity) and crc == crc32c(
            bytes(header)
        )

    def _checksums(self, bare: bytes | memoryview) -> tuple[int, ...]:
        size = self.frame_bytes // self.layers
        return tuple(crc32c(bytes(bare[layer * size : (layer + 1) * size])) for layer in range(self.layers))
