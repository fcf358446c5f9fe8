"""SipHash-2-4 with a 128-bit result (Aumasson and Bernstein, INDOCRYPT 2012; the 128-bit variant of their reference code).

A keyed pseudo-random function: without the secret nobody can build two prompts with the same block key.
"""

from __future__ import annotations

import struct
from typing import Final

_M: Final = 0xFFFFFFFFFFFFFFFF


def _rotl(x: int, n: int) -> int:
    return ((x << n) | (x >> (64 - n))) & _M


def _rounds(v: tuple[int, int, int, int], n: int) -> tuple[int, int, int, int]:
    v0, v1, v2, v3 = v
    for _ in range(n):
        v0 = (v0 + v1) & _M
        v1 = _rotl(v1, 13) ^ v0
        v0 = _rotl(v0, 32)
        v2 = (v2 + v3) & _M
        v3 = _rotl(v3, 16) ^ v2
        v0 = (v0 + v3) & _M
        v3 = _rotl(v3, 21) ^ v0
        v2 = (v2 + v1) & _M
        v1 = _rotl(v1, 17) ^ v2
        v2 = _rotl(v2, 32)
    return v0, v1, v2, v3


def siphash128(key: bytes, data: bytes) -> bytes:
    """16-byte digest of `data` under the 16-byte `key`."""
    k0, k1 = struct.unpack("<QQ", key)
    v = (0x736F6D6570736575 ^ k0, 0x646F72616E646F6D ^ k1 ^ 0xEE, 0x6C7967656E657261 ^ k0, 0x7465646279746573 ^ k1)
    whole = len(data) // 8 * 8
    last = int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56
    for (m,) in [*struct.iter_unpack("<Q", data[:whole]), (last,)]:
        v0, v1, v2, v3 = _rounds((v[0], v[1], v[2], v[3] ^ m), 2)
        v = (v0 ^ m, v1, v2, v3)
    v = _rounds((v[0], v[1], v[2] ^ 0xEE, v[3]), 4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v = _rounds((v[0], v[1] ^ 0xDD, v[2], v[3]), 4)
    return struct.pack("<QQ", first, v[0] ^ v[1] ^ v[2] ^ v[3])
