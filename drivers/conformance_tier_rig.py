"""What the tiers' conformance suite stands on: one tier driver with a dram, an hbm and gates, and transfers by hand.

Contents are made from a number, so that any frame can be told from any other and made again for comparison.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import signal
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import GATES, PRIVATE, Tag

from .channel import BadMessage
from .conformance_process import DriverProcess, Nonconformance, require
from .memfd import create_memfd, map_shared
from .messages import decode_found, decode_moved, transfer_message
from .spec import DriverSpec
from .stored import Gates, StoredFormat

DRAM: Final = 1  # device numbers
HBM: Final = 0
JUNK: Final = 0x6B  # dram and hbm begin with this


class Traits(NamedTuple):
    """What a tier promises beyond moving stored frames.

    keeps_private     blocks of one context may be written to it
    survives_restart  the next life of its driver finds what an earlier one wrote
    is_addressed      frame numbers are places: what was written to one is overwritten by the next write to it
    """

    keeps_private: bool = True
    survives_restart: bool = True
    is_addressed: bool = True


class TierRig(DriverProcess):
    """A tier driver under test.

    spec      how it is started; the rig adds the format, the descriptors and device numbers to its configuration
    format    of the stored frames
    dram      the arena; `dram_frames` stored frames, 24 or more for the suite
    hbm       an arena of bare frames, `hbm_frames` of them
    flip      (frame, offset in its stored frame): invert one bit of what the tier keeps; None where that cannot be done
    """

    def __init__(
        self,
        spec: DriverSpec,
        format: StoredFormat,
        *,
        traits: Traits | None = None,
        dram_frames: int = 32,
        hbm_frames: int = 16,
        flip: Callable[[int, int], None] | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        self.format = format
        self.traits = Traits() if traits is None else traits
        self.flip = flip
        self.dram_frames = dram_frames
        self.hbm_frames = hbm_frames
        self._deadline_s = deadline_s
        self._seq = 0
        self._items: dict[int, int] = {}  # of transfers not answered yet
        self._dram_fd = create_memfd("conformance-dram", dram_frames * format.stored_bytes)
        self._rows_fd = create_memfd("conformance-rows", 4096)
        hbm_fd = create_memfd("conformance-hbm", hbm_frames * format.frame_bytes)
        gates_fd = create_memfd("conformance-gates", 8 * GATES)
        self._fds = [self._dram_fd, self._rows_fd, hbm_fd, gates_fd]
        self.dram = map_shared(self._dram_fd)
        self.hbm = map_shared(hbm_fd)
        self.gates = Gates(map_shared(gates_fd))
        self.spoil()
        config = {
            **spec.config,
            "frame_bytes": format.frame_bytes,
            "layers": format.layers,
            "block_tokens": format.block_tokens,
            "identity": format.identity.hex(),
            "stored_bytes": format.stored_bytes,
            "dram_fd": self._dram_fd,
            "dram_device": DRAM,
            "dram_frames": dram_frames,
            "gates_fd": gates_fd,
            "hbm_fds": {str(HBM): hbm_fd},
        }
        fds = {**spec.fds, "dram": self._dram_fd, "gates": gates_fd, "hbm0": hbm_fd}
        self._spec = dataclasses.replace(spec, config=config, fds=fds)
        self._start()

    def _start(self) -> None:
        super().__init__(self._spec, self._dram_fd, self._rows_fd, deadline_s=self._deadline_s)
        self._items.clear()

    def restart(self, *, kill: bool) -> None:
        """End the process, with SIGKILL or by closing its channel, and start it again with the same memory."""
        self.stop(kill=kill)
        self._start()

    def stop(self, *, kill: bool) -> None:
        """End the process and reap it; the memory stays."""
        if kill:
            self.process.send_signal(signal.SIGKILL)
        self.channel.close()
        require(self.wait_for_exit() is not None, f"it still runs {self.deadline_s:g} s after its channel was closed")

    def close(self) -> None:
        super().close()
        while self._fds:
            os.close(self._fds.pop())

    # -- contents -------------------------------------------------------------------------------------------------

    def spoil(self) -> None:
        """Fill dram and hbm with junk."""
        self.dram[:] = bytes([JUNK]) * len(self.dram)
        self.hbm[:] = bytes([JUNK]) * len(self.hbm)

    def payload(self, number: int) -> bytes:
        """The KV of block `number`."""
        return random.Random(number).randbytes(self.format.frame_bytes)

    def tag(self, number: int, **changes: Any) -> bytes:
        """The packed tag of block `number`; `changes` replace fields of it."""
        digest = hashlib.blake2b(b"%d" % number, digest_size=48).digest()
        n = self.format.block_tokens
        tokens = array("i", range(number % 1000, number % 1000 + n)).tobytes()
        tag = Tag(digest[:16], digest[16:32], b"the-domain's-key", 2 * n, n, 0, b"default", tokens)
        return tag._replace(**changes).pack(n)

    def private_tag(self, number: int) -> bytes:
        return self.tag(number, ntokens=1, flags=PRIVATE, tokens=bytes(4))

    def stored(self, number: int, tag: bytes | None = None) -> bytes:
        """The whole stored frame of block `number`, as a compute driver would have made it."""
        frame = bytearray(self.format.stored_bytes)
        failures = self.format.seal(
            self.payload(number), frame, struct.pack("<ii", 0, 0), self.tag(number) if tag is None else tag
        )
        assert not failures
        return bytes(frame)

    def put(self, frame: int, content: bytes) -> None:
        """Place a stored frame in dram."""
        self.dram[frame * self.format.stored_bytes : (frame + 1) * self.format.stored_bytes] = content

    def get(self, frame: int) -> bytes:
        return bytes(self.dram[frame * self.format.stored_bytes : (frame + 1) * self.format.stored_bytes])

    def hbm_frame(self, frame: int) -> bytes:
        return bytes(self.hbm[frame * self.format.frame_bytes : (frame + 1) * self.format.frame_bytes])

    def dram_digests(self) -> list[bytes]:
        return [hashlib.blake2b(self.get(frame), digest_size=16).digest() for frame in range(self.dram_frames)]

    # -- transfers ------------------------------------------------------------------------------------------------

    def begin(
        self,
        verb: str,
        pairs: Sequence[tuple[int, int]],
        tags: Sequence[bytes],
        *,
        arena: int = DRAM,
        gate: int = -1,
        ticket: int = 0,
    ) -> int:
        """Send a transfer; its seq.  pairs: (frame of the tier, frame of the arena)."""
        self._seq += 1
        packed = b"".join(struct.pack("<ii", *pair) for pair in pairs)
        self._items[self._seq] = len(pairs)
        self.send(transfer_message(Transfer(0, self._seq, verb, arena, packed, b"".join(tags), gate, ticket)))
        return self._seq

    def collect(self, seq: int | None = None) -> list[TransferDone]:
        """Answers, in their order, until that of transfer `seq` is there, or all of them are."""
        done: list[TransferDone] = []
        while self._items and not (done and done[-1].seq == seq):
            message = self.receive("answer to a transfer")
            require(message[0] == "moved", f"a transfer was answered with {message!r:.200}")
            items = self._items.pop(message[1], None) if len(message) > 1 and isinstance(message[1], int) else None
            if items is None:
                raise Nonconformance(f"answered a transfer that nobody waits for: {message!r:.200}")
            try:
                done.append(decode_moved(message, 0, items))
            except BadMessage as error:
                raise Nonconformance(str(error)) from error
        return done

    def has_answer(self) -> bool:
        """Whether something has arrived, without waiting."""
        self._inbox.extend(self.channel.recv_ready())
        return bool(self._inbox) or self.channel.eof

    def move(self, verb: str, pairs: Sequence[tuple[int, int]], tags: Sequence[bytes], **options: Any) -> TransferDone:
        """One transfer, to its end; nothing else may be under way."""
        seq = self.begin(verb, pairs, tags, **options)
        (done,) = self.collect(seq)
        good = len(pairs) - len(done.failed)
        require(
            good * self.format.frame_bytes <= done.moved_bytes <= good * self.format.stored_bytes,
            f"{good} frames of {self.format.stored_bytes} bytes were counted as {done.moved_bytes} bytes",
        )
        require(done.elapsed_ns > 0 or not good, "a transfer took no time")
        return done

    def write(self, *blocks: tuple[int, int]) -> None:
        """Write blocks to frames, (block, frame) each; they go through the first frames of dram."""
        for at, (number, _) in enumerate(blocks):
            self.put(at, self.stored(number))
        pairs = [(frame, at) for at, (_, frame) in enumerate(blocks)]
        done = self.move("write", pairs, [self.tag(number) for number, _ in blocks])
        require(not done.failed, f"writing failed: {done.failed}")

    def read(self, *blocks: tuple[int, int]) -> list[int]:
        """Read blocks from frames, (block, frame) each; the errno of each, 0 where exactly its content came."""
        base = self.dram_frames - len(blocks)
        pairs = [(frame, base + at) for at, (_, frame) in enumerate(blocks)]
        done = self.move("read", pairs, [self.tag(number) for number, _ in blocks])
        codes = dict(done.failed)
        for at, (number, frame) in enumerate(blocks):
            if at not in codes and self.get(base + at) != self.stored(number):
                raise Nonconformance(f"block {number} came back from frame {frame} as something else")
        return [codes.get(at, 0) for at in range(len(blocks))]

    def found(self) -> dict[int, bytes]:
        """What it said it found when it started: packed tag by frame."""
        found: dict[int, bytes] = {}
        row_bytes = 4 + self.format.tag_bytes
        for message in self.before_probe:
            rows = decode_found(message, 0, 1, self.format.block_tokens).rows
            for at in range(0, len(rows), row_bytes):
                (frame,) = struct.unpack_from("<i", rows, at)
                require(frame not in found, f"frame {frame} was found twice")
                found[frame] = rows[at + 4 : at + row_bytes]
        return found
