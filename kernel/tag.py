"""What travels with a block's content to every tier, and how a stored frame is laid out.

A frame of `hbm` is bare KV.  A frame of any other tier is a *stored frame*: one 4,096-byte header, then the same KV,
padded to 4,096 bytes, so that a copy to or from a file is one direct transfer.  The kernel writes a `Tag` per block
into every transfer; the driver that copies out of hbm puts it into the header together with one checksum per layer, and
every later reader compares both.  So a lost, torn, swapped or flipped copy is found before it is used.

    offset  bytes   what
         0      8   MAGIC
         8      4   version (STORED_VERSION)
        12      4   CRC-32C of the header's 4,096 bytes with this field zero
        16      8   generation: grows with each write of this slot of a file tier; 0 elsewhere
        24      4   payload bytes (frame_bytes)
        28      4   layers L; layer l of the payload is bytes [l * payload/L, (l + 1) * payload/L)
        32     16   identity digest: of everything that decides what KV a token gets
        48     16   zero
        64    128   tag head (TAG_HEAD)
       192  4 x B   the block's tokens, int32, zero beyond `ntokens`
      2048  4 x L   CRC-32C of each layer's bytes
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

MAGIC: Final = b"ATNXBLK1"
STORED_VERSION: Final = 1
HEADER_BYTES: Final = 4096
TAG_OFFSET: Final = 64
CHECKSUM_OFFSET: Final = 2048
MAX_LAYERS: Final = (HEADER_BYTES - CHECKSUM_OFFSET) // 4

TAG_HEAD: Final = struct.Struct("<16s16s16siiII64s")
TAG_HEAD_BYTES: Final = 128
assert TAG_HEAD.size == TAG_HEAD_BYTES

PRIVATE: Final = 1  # a partial block under a private key: of one context, found by nobody else, void after a restart


class Tag(NamedTuple):
    """One block, named.

    key     16 bytes: chained block key, or a private key (PRIVATE)
    parent  16 bytes: key of the block before it, the domain's root key for the first
    root    16 bytes: the domain's root key, which depends on identity and domain
    depth   tokens before it
    ntokens tokens whose KV is in it, 1..block_tokens
    flags   PRIVATE or 0
    domain  name of the sharing domain, at most 63 bytes of UTF-8
    tokens  int32, ntokens of them
    """

    key: bytes
    parent: bytes
    root: bytes
    depth: int
    ntokens: int
    flags: int
    domain: bytes
    tokens: bytes

    def pack(self, block_tokens: int) -> bytes:
        head = TAG_HEAD.pack(
            self.key, self.parent, self.root, self.depth, self.ntokens, self.flags, 0, self.domain
        )  # fmt: skip
        return head + self.tokens.ljust(4 * block_tokens, b"\0")


def tag_bytes(block_tokens: int) -> int:
    """Bytes of one packed tag."""
    return TAG_HEAD_BYTES + 4 * block_tokens


def unpack_tag(data: bytes, block_tokens: int) -> Tag:
    """ValueError: not the size of a tag, or more tokens than a block has."""
    if len(data) != tag_bytes(block_tokens):
        raise ValueError(f"a tag has {tag_bytes(block_tokens)} bytes, not {len(data)}")
    key, parent, root, depth, ntokens, flags, _, domain = TAG_HEAD.unpack_from(data)
    if not 0 <= ntokens <= block_tokens or depth < 0:
        raise ValueError(f"a tag of {ntokens} tokens at depth {depth}")
    tokens = data[TAG_HEAD_BYTES : TAG_HEAD_BYTES + 4 * ntokens]
    return Tag(key, parent, root, depth, ntokens, flags, domain.rstrip(b"\0"), tokens)


def stored_bytes(frame_bytes: int) -> int:
    """Bytes of a stored frame that holds `frame_bytes` of KV."""
    return HEADER_BYTES + -(-frame_bytes // HEADER_BYTES) * HEADER_BYTES


# -- gates: how far a transfer has come ---------------------------------------------------------------------------------
# One shared int64 array.  The driver that fills hbm frames stores `gate_value(ticket, layers)` after each layer (or group
# of layers) of *all* blocks of the transfer has landed; a compute driver may run layer l once value >= gate_value(ticket,
# l + 1).  GATE_FAILED as the layer count means that the transfer failed: the pass must fail too.
GATES: Final = 1024  # entries
GATE_FAILED: Final = 1023
GATE: Final = struct.Struct("<qq")  # (gate, ticket), as a pass carries them


def gate_value(ticket: int, layers: int) -> int:
    """Tickets grow, so a value of an earlier transfer through the same gate is always smaller."""
    return ticket << 10 | layers
