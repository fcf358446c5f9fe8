"""What computes, behind one protocol: the CPU engine (cpu_engine.py) and the CUDA engine (cuda/engine.py).

The driver (driver.py) decodes a pass, and says which rows need logits; an engine runs the pass on frames and page-table
rows that it was attached to, and draws.  What a pass must be, what refuses it and what is left behind when it fails are the
same for all engines (model.py, `Refusal` and `LoadFailed`); tests/model runs its cases on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from attnix.kernel.batch import FORWARD, SAMPLE, SCORE, SEQ_FIELDS
from attnix.kernel.events import Transfer, TransferDone

from .config import ModelConfig
from .model import F32, GATE_LIMIT_NS, I32, I64, NO_GATES, PageRows
from .sampler import Top
from .transfers import Speed

SEQ_DTYPE: Final = np.dtype(SEQ_FIELDS)
Seqs = npt.NDArray[Any]  # SEQ_DTYPE
Arena = Literal["kept", "lost"]


class Want(NamedTuple):
    """Which token rows of a pass need logits.

    rows   [w] i32   token rows, first those of `last`, then those of each SCORE sequence in batch order
    last   [n] i64   sequences whose last position is wanted (SAMPLE or FORWARD)
    scored           per SCORE sequence: the target tokens of its rows
    """

    rows: I32
    last: I64
    scored: list[I32]


def wanted_rows(seqs: Seqs, tokens: I32) -> Want:
    """Work out `Want`; driver.py's text says what SCORE returns."""
    last = np.flatnonzero(seqs["flags"] & (SAMPLE | FORWARD))
    ends = seqs["token_offset"] + seqs["ntokens"]
    rows = [(ends[last] - 1).astype(np.int32)]
    scored: list[I32] = []
    for seq in seqs[(seqs["flags"] & SCORE) != 0]:
        start, offset = int(seq["start"]), int(seq["token_offset"])
        first = max(int(seq["score_from"]) - start, 1)  # index, within the pass, of the first token with a score
        indices = np.arange(first, int(seq["ntokens"]), dtype=np.int32)
        rows.append(offset + indices - 1)
        scored.append(tokens[offset + indices])
    return Want(np.concatenate(rows, dtype=np.int32), last, scored)


class Pass(NamedTuple):
    """One pass, decoded.

    seqs       [S]     SEQ_DTYPE, token_offset the running sum of ntokens
    tokens     [T]     i32
    copies     [n, 2]  i32  (source, destination) frames, copied in order before anything else
    want               rows whose logits are wanted
    histories          per sequence: its tokens before the sampled one, where it has penalties
    gates      [g, 2]  i64  (gate, ticket) of the loads that the pass must not overtake
    allowed            by sequence, where it has a mask: [V] bool, the tokens that may be among its alternatives
    """

    seqs: Seqs
    tokens: I32
    copies: I32
    want: Want
    histories: Sequence[I32 | None]
    gates: I64 = NO_GATES
    allowed: Mapping[int, npt.NDArray[np.bool_]] = MappingProxyType({})


class Results(NamedTuple):
    """What a pass brought, in batch order.

    tokens, logprobs  [n]  one per SAMPLE sequence
    tops                   one per sequence that wants alternatives
    scores                 one array per SCORE sequence
    waited_ns              spent waiting for loads
    """

    tokens: I32
    logprobs: F32
    tops: list[Top]
    scores: list[F32]
    waited_ns: int


def sampling_rows(work: Pass) -> tuple[I64, I64]:
    """Of the rows of `want.last`: those that draw, and the sequences they belong to."""
    rows = np.flatnonzero(work.seqs["flags"][work.want.last] & SAMPLE)
    return rows, work.want.last[rows]


def top_rows(work: Pass) -> list[tuple[int, int, npt.NDArray[np.bool_] | None]]:
    """(row of `want.last`, alternatives, mask of those allowed) of every sequence that wants some."""
    last = work.want.last
    flags, wanted = work.seqs["flags"][last], work.seqs["logprobs"][last]
    rows = np.flatnonzero((flags & FORWARD != 0) | (wanted > 0))
    return [(int(row), int(wanted[row]), work.allowed.get(int(last[row]))) for row in rows]


class Carrier(Protocol):
    """The transfers of one accel with one dram arena (transfers.py says what they mean)."""

    counters: dict[str, int]

    @property
    def stored_bytes(self) -> int: ...

    def identify(self, digest: bytes) -> None: ...

    def run(self, transfer: Transfer) -> TransferDone | None:
        """Move everything.  None, of a carrier that moves aside: begun, and `completed` will say how it ended."""
        ...

    def measure(self) -> Speed: ...


@runtime_checkable
class DeepCarrier(Carrier, Protocol):
    """A carrier that moves beside the passes (serve.py, DeepMover)."""

    def fileno(self) -> int: ...

    def completed(self) -> list[TransferDone]: ...


class Engine(Protocol):
    """A model, and passes over the frames and rows that `attach` named."""

    config: ModelConfig
    threads: int
    arena: Arena  # what the death of the driver leaves of the frames

    @property
    def compiles(self) -> bool:
        """Whether the first pass of a kind compiles kernels: it may take seconds, and says nothing of the next one."""
        ...

    @property
    def engine(self) -> str:
        """What computes, for `probe`; part of every block key."""
        ...

    @property
    def waited_ns(self) -> int:
        """Of the last pass: nanoseconds that it spent waiting for loads."""
        ...

    def frame_bytes(self, block_tokens: int) -> int: ...

    def attach(self, arena: Any, rows: PageRows, block_tokens: int, capacity: int) -> None:
        """Use these frames and rows from now on.  Error: ValueError; MemoryError, no room for the frames."""
        ...

    def attach_gates(self, gates: Any) -> None:
        """Shared memory through which loads report their progress (kernel/tag.py)."""
        ...

    def forward(
        self, seqs: Seqs, tokens: I32, copies: I32, want: I32, gates: I64 = NO_GATES, gate_limit_ns: int = GATE_LIMIT_NS
    ) -> F32:
        """The pass alone, without drawing: logits of the wanted rows.  Error: PassRefused, LoadFailed, MemoryError."""
        ...

    def compute(self, work: Pass) -> Results:
        """The pass and its draws.  Error: those of `forward`, BadLogits, ValueError (a history or temperature)."""
        ...

    def scratch(self, block_tokens: int, frames: int) -> Any:
        """An arena for passes that serve nobody (calibration), for `attach`."""
        ...

    def drop(self, frames: Sequence[int]) -> None:
        """Overwrite these frames with zeros; they exist."""
        ...

    def carrier(self, dram: Any, device: int, gates: Any) -> Carrier:
        """Transfers between the attached frames and this dram arena.  Error: ValueError."""
        ...
