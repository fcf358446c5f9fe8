"""Stored frames: what a frame of any tier but hbm holds, made and checked in C (drivers/csrc/stored.c).

    format = StoredFormat(frame_bytes, layers, block_tokens, identity)
    format.seal(hbm, dram, pairs, tags)      hbm -> dram: copy, one checksum per layer, header
    format.unseal(hbm, dram, pairs, tags)    dram -> hbm: check header and tag, copy, check every layer
    format.verify(dram, frames, tags)        look at stored frames where they lie (a remote tier, after receiving)

`pairs` are int32 (bare frame, stored frame), as in a transfer between an accel and a dram; `tags` are packed Tags
(kernel/tag.py), one per pair.  The arenas are any contiguous buffers (mmap, memoryview, numpy).  What could not be done
comes back item by item, as a code: `explain` says it in words, `errno_of` as the errno of a transfer's answer.
The interpreter lock is released while C runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

from attnix.kernel.errors import E
from attnix.kernel.tag import (
    CHECKSUM_OFFSET,
    GATES,
    HEADER_BYTES,
    MAX_LAYERS,
    TAG_OFFSET,
    gate_value,
    stored_bytes,
    tag_bytes,
)

from ._stored import ffi, lib

CRC_ENGINE: Final = ("table", "instruction", "folding")[lib.ax_crc_best()]


class Reason(IntEnum):
    """Why a stored frame was refused: the low 8 bits of a code; the bits above are the layer, for LAYER."""

    OK = 0
    RANGE = 1
    MAGIC = 2
    HEADER = 3
    VERSION = 4
    SHAPE = 5
    IDENTITY = 6
    KEY = 7
    TAG = 8
    LAYER = 9


_WORDS: Final = {
    Reason.OK: "valid",
    Reason.RANGE: "no such frame",
    Reason.MAGIC: "no stored frame there: never written, dropped or overwritten",
    Reason.HEADER: "the header's checksum is wrong",
    Reason.VERSION: "another version of the format",
    Reason.SHAPE: "another frame size or number of layers",
    Reason.IDENTITY: "made under another identity (model, dtype, geometry, engine)",
    Reason.KEY: "another block's key",
    Reason.TAG: "the right key, but another parent, root, depth, length, domain or other tokens",
    Reason.LAYER: "a layer's checksum is wrong",
}


class Failure(NamedTuple):
    """One item that failed: its index in the batch, and a code (Reason and layer)."""

    item: int
    code: int


def explain(code: int) -> str:
    reason = Reason(code & 0xFF)
    return f"layer {code >> 8}: its checksum is wrong" if reason is Reason.LAYER else _WORDS[reason]


def errno_of(code: int) -> int:
    """0, EINVAL for a frame that does not exist, ECORRUPT for everything else."""
    if code == Reason.OK:
        return 0
    return int(E.EINVAL if code == Reason.RANGE else E.ECORRUPT)


def errors(failures: Iterable[Failure]) -> list[tuple[int, int]]:
    """Failures as a transfer's answer lists them: (item, errno)."""
    return [(item, errno_of(code)) for item, code in failures]


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a buffer; `crc` of what comes before it, to go on from there."""
    view = ffi.from_buffer("char[]", data)
    return lib.ax_crc32c(crc, view, len(view))


def copy_crc32c(to: Any, source: Any, crc: int = 0) -> int:
    """Copy all of `source` to the start of `to`, in one pass over memory with its CRC-32C.  Error: ValueError, no room."""
    view, room = ffi.from_buffer("char[]", source), ffi.from_buffer("char[]", to, require_writable=True)
    if len(view) > len(room):
        raise ValueError(f"{len(view)} bytes do not fit {len(room)}")
    return lib.ax_copy_crc32c(crc, room, view, len(view))


class Gates:
    """The shared gates (kernel/tag.py) as a driver uses them.  mapping: of at least GATES int64, writable."""

    def __init__(self, mapping: Any) -> None:
        self._view = ffi.from_buffer("int64_t[]", mapping, require_writable=True)
        if len(self._view) < GATES:
            raise ValueError(f"{len(self._view)} gates; there must be {GATES}")

    def pointer(self, gate: int) -> Any:
        """The address of a gate, for C.  Error: ValueError."""
        if not 0 <= gate < GATES:
            raise ValueError(f"gate {gate} of {GATES}")
        return self._view + gate

    def store(self, gate: int, ticket: int, layers: int) -> None:
        """Say with release order that `layers` layers of all blocks have landed, or GATE_FAILED.  Never goes back."""
        lib.ax_gate_store(self.pointer(gate), gate_value(ticket, layers))

    def load(self, gate: int) -> int:
        return lib.ax_gate_load(self.pointer(gate))


class StoredFormat:
    """The one format of all stored frames of a system.  Error: ValueError when the numbers do not go together.

    frame_bytes  of a bare frame
    layers       which divide it evenly
    identity     16 bytes: of everything that decides what KV a token gets
    """

    def __init__(self, frame_bytes: int, layers: int, block_tokens: int, identity: bytes) -> None:
        if not 1 <= layers <= MAX_LAYERS or frame_bytes < layers or frame_bytes % layers or frame_bytes >= 1 << 31:
            raise ValueError(f"a frame of {frame_bytes} bytes in {layers} layers")
        if block_tokens < 1 or TAG_OFFSET + tag_bytes(block_tokens) > CHECKSUM_OFFSET:
            raise ValueError(f"the tag of a block of {block_tokens} tokens does not fit its header")
        if len(identity) != 16:
            raise ValueError(f"an identity of {len(identity)} bytes, not 16")
        self.frame_bytes = frame_bytes
        self.layers = layers
        self.layer_bytes = frame_bytes // layers
        self.block_tokens = block_tokens
        self.identity = identity
        self.stored_bytes = stored_bytes(frame_bytes)
        self.tag_bytes = tag_bytes(block_tokens)
        self.c: Any = ffi.new(
            "ax_stored *", [frame_bytes, self.layer_bytes, self.stored_bytes, layers, self.tag_bytes, identity]
        )

    # -- headers --------------------------------------------------------------------------------------------------

    def encode_header(self, tag: bytes, checksums: Sequence[int], generation: int = 0) -> bytes:
        """A whole header.  tag: packed; checksums: CRC-32C of each layer.  Error: ValueError."""
        if len(tag) != self.tag_bytes or len(checksums) != self.layers:
            raise ValueError(f"a tag of {len(tag)} bytes with {len(checksums)} checksums")
        header = ffi.new("char[]", HEADER_BYTES)
        lib.ax_header_encode(self.c, header, tag, ffi.new("uint32_t[]", list(checksums)), generation)
        return bytes(ffi.buffer(header))

    def check_header(self, header: Any, tag: bytes | None = None) -> int:
        """The code of a header on its own (not of the payload): OK, or the first thing that is wrong with it.

        tag: what it must carry; None accepts any.  Error: ValueError when the buffer is too short.
        """
        view = ffi.from_buffer("char[]", header)
        if len(view) < HEADER_BYTES or (tag is not None and len(tag) != self.tag_bytes):
            raise ValueError(f"a header of {len(view)} bytes")
        return lib.ax_header_check(self.c, view, ffi.NULL if tag is None else tag)

    def header_tag(self, header: Any) -> bytes:
        """The packed tag in a header, whose check is the caller's."""
        return bytes(memoryview(header)[TAG_OFFSET : TAG_OFFSET + self.tag_bytes])

    # -- batches --------------------------------------------------------------------------------------------------

    def seal(self, bare: Any, stored: Any, pairs: bytes, tags: bytes) -> list[Failure]:
        """Make stored frames out of bare ones: for each pair copy, checksum every layer, write header and padding.

        Only RANGE can fail.  Generation is 0.  Error: ValueError when pairs and tags do not go together.
        """
        n = self._count(pairs, 8, tags)
        codes = ffi.new("int32_t[]", n)
        source, to = ffi.from_buffer("char[]", bare), ffi.from_buffer("char[]", stored, require_writable=True)
        failed = lib.ax_seal(
            self.c, source, len(source), to, len(to), ffi.from_buffer("int32_t[]", pairs), n, tags, codes
        )
        return _failures(codes, n) if failed else []

    def unseal(self, bare: Any, stored: Any, pairs: bytes, tags: bytes) -> list[Failure]:
        """Copy the payloads of stored frames into bare ones: header, tag and every layer are compared.

        The bare frame of an item that failed holds junk.  Error: ValueError as `seal`.
        """
        n = self._count(pairs, 8, tags)
        codes = ffi.new("int32_t[]", n)
        to, source = ffi.from_buffer("char[]", bare, require_writable=True), ffi.from_buffer("char[]", stored)
        failed = lib.ax_unseal(
            self.c, to, len(to), source, len(source), ffi.from_buffer("int32_t[]", pairs), n, tags, codes
        )
        return _failures(codes, n) if failed else []

    def unseal_gated(
        self, bare: Any, stored: Any, pairs: bytes, tags: bytes, gates: Gates, gate: int, ticket: int, group: int = 1
    ) -> list[Failure]:
        """`unseal` in layer order over all items, reporting progress at a gate after every `group` layers.

        The gate says GATE_FAILED from the first failure on; items without a failure are still completed.
        """
        n = self._count(pairs, 8, tags)
        codes = ffi.new("int32_t[]", n)
        to, source = ffi.from_buffer("char[]", bare, require_writable=True), ffi.from_buffer("char[]", stored)
        failed = lib.ax_unseal_gated(
            self.c, to, len(to), source, len(source), ffi.from_buffer("int32_t[]", pairs), n, tags, codes,
            gates.pointer(gate), ticket, max(1, group),
        )  # fmt: skip
        return _failures(codes, n) if failed else []

    def verify(self, stored: Any, frames: bytes, tags: bytes | None = None) -> list[Failure]:
        """Check stored frames in place: header, every layer, and the tag where one is given.  frames: int32 indices."""
        n = self._count(frames, 4, tags)
        codes = ffi.new("int32_t[]", n)
        view = ffi.from_buffer("char[]", stored)
        failed = lib.ax_verify(
            self.c, view, len(view), ffi.from_buffer("int32_t[]", frames), n, ffi.NULL if tags is None else tags, codes
        )
        return _failures(codes, n) if failed else []

    def placed(self, stored: Any, frames: bytes, tags: bytes) -> Placed:
        """Stored frames whose payloads something else copies in or out (a device): see Placed.  Error: ValueError."""
        return Placed(self, stored, frames, tags, self._count(frames, 4, tags))

    def _count(self, frames: bytes, item_bytes: int, tags: bytes | None) -> int:
        n = len(frames) // item_bytes
        if len(frames) % item_bytes or (tags is not None and len(tags) != n * self.tag_bytes):
            given = "no" if tags is None else len(tags)
            raise ValueError(f"{len(frames)} bytes of frames with {given} bytes of tags of {self.tag_bytes}")
        return n


class Placed:
    """A batch of stored frames whose payloads a device reads or writes where they lie.

    Out of them: `verify_layers` from layer 0 on, each group before the device is told to read it.
    Into them: `void`, the device writes payloads, `seal`.
    """

    def __init__(self, format_: StoredFormat, stored: Any, frames: bytes, tags: bytes, n: int) -> None:
        self._c, self._n, self._tags = format_.c, n, tags
        self._stored = ffi.from_buffer("char[]", stored, require_writable=True)
        self._frames = ffi.from_buffer("int32_t[]", frames)
        self._codes = ffi.new("int32_t[]", n)

    def verify_layers(self, first: int, count: int) -> bool:
        """Check layers first .. first + count - 1 of every item (with layer 0 its header); whether all are good so far."""
        stored, n = self._stored, self._n
        return not lib.ax_verify_layers(
            self._c, stored, len(stored), self._frames, n, self._tags, self._codes, first, count
        )

    def void(self) -> bool:
        """Make them no stored frames; whether all exist."""
        return not lib.ax_void(self._c, self._stored, len(self._stored), self._frames, self._n, self._codes)

    def seal(self) -> None:
        """Header, checksums and padding for the items that exist, around payloads that are there."""
        lib.ax_seal_placed(self._c, self._stored, self._frames, self._n, self._tags, self._codes)

    @property
    def failures(self) -> list[Failure]:
        return _failures(self._codes, self._n)


def _failures(codes: Any, n: int) -> list[Failure]:
    return [Failure(item, codes[item]) for item in range(n) if codes[item]]
