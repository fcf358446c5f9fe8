"""The accel driver as a backend of the driver protocol: packs a model, runs passes on the arena, samples.

It keeps nothing about contexts: a pass names everything, and what it wrote lies in the frames.

What a pass returns per sequence, in batch order (kernel/events.py, ExecDone):

    SAMPLE   a token, drawn from the logits of the sequence's last position, and its log-probability
    FORWARD  the `logprobs` most likely tokens there (also for SAMPLE with logprobs > 0)
    SCORE    log P(token at p | tokens before p) for every p in max(score_from, start + 1) .. start + ntokens - 1: the
             token at p is the pass's own, its probability comes from the logits of p - 1.  So passes that score a long
             text overlap by one token, and the first token of a context has no score.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from attnix.kernel.batch import ALLOWED, HISTORY, SEQ_BYTES
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Transfer, TransferDone
from attnix.kernel.geometry import RowLayout
from attnix.kernel.params import BLOCK_TOKENS
from attnix.kernel.tag import GATES

from ..channel import EPOCH_VARIABLE
from ..memfd import advise_huge_pages, map_read_only, map_shared, populate_aside
from ..protocol import PROTOCOL_VERSION, Probe, TimedPrefill
from ..serve import ConfigError, DriverArguments
from .calibration import measure_prefill
from .config import ELEMENT_BYTES, Dtype, KvDtype, ModelConfig
from .cpu_engine import CpuEngine
from .engine import SEQ_DTYPE, Carrier, DeepCarrier, Engine, Pass, wanted_rows
from .identity import fingerprint
from .model import LoadFailed, Numerics, PageRows, PassRefused, Refusal
from .model_files import ModelError
from .sampler import BadLogits
from .transfers import Speed
from .weights import Weights, open_model

Devices = Literal["cpu", "cuda", "cuda-dry"]


class AccelConfig(NamedTuple):
    """The driver's settings, as they come in --config.

    model         path of a Hugging Face directory or GGUF file
    slots, entries  layout of the page-table rows (kernel/geometry.py)
    block_tokens  tokens per frame
    dtype         of the packed weights: float32 | bfloat16
    kv_dtype      of the frames: float32 | bfloat16 | int8
    numerics      fast | invariant
    threads       0: one per core
    cache_dir     where content digests are kept between runs; "": nowhere
    gates_fd      descriptor of the gates; -1: none
    dram_fd, dram_device  descriptor of the dram arena and its device number; -1: there is none, and no transfers
    dram_frames   stored frames that it must have room for
    identity      32 hex digits, what every stored frame's header carries; "": told later
    layers        of the model, 0: whatever it has
    device        cpu | cuda | cuda-dry (the CUDA engine on the CPU, for tests: docs/cuda.md)
    ordinal       which CUDA device
    frames        of a CUDA device: how many it holds, in its own memory; 0: as many as the arena would
    mirror        of a CUDA device: the arena shows its frames after every message, and sets them before: for tests
    """

    model: str
    slots: int
    entries: int
    block_tokens: int = BLOCK_TOKENS
    dtype: Dtype = "bfloat16"
    kv_dtype: KvDtype = "bfloat16"
    numerics: Numerics = "fast"
    threads: int = 0
    cache_dir: str = ""
    gates_fd: int = -1
    dram_fd: int = -1
    dram_device: int = -1
    dram_frames: int = 0
    identity: str = ""
    layers: int = 0
    device: Devices = "cpu"
    ordinal: int = 0
    frames: int = 0
    mirror: bool = False

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> AccelConfig:
        """Check names, types and choices.  Error: ConfigError."""
        choices = {
            "dtype": get_args(Dtype), "kv_dtype": tuple(ELEMENT_BYTES), "numerics": ("fast", "invariant"),
            "device": ("cpu", "cuda", "cuda-dry"),
        }  # fmt: skip
        for name, value in raw.items():
            if name not in cls._fields:
                raise ConfigError(f"unknown setting {name!r}; there are {', '.join(cls._fields)}")
            kind = type(cls._field_defaults.get(name, 0 if name in ("slots", "entries") else ""))
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"setting {name!r} must be {kind.__name__}, not {value!r}")
            if name in choices and value not in choices[name]:
                raise ConfigError(f"setting {name!r} must be one of {', '.join(choices[name])}, not {value!r}")
        missing = [name for name in ("model", "slots", "entries") if name not in raw]
        if missing:
            raise ConfigError(f"setting {missing[0]!r} is required")
        config = cls(**raw)
        if min(config.slots, config.entries, config.block_tokens) < 1:
            raise ConfigError("slots, entries and block_tokens must be positive")
        if min(config.threads, config.ordinal, config.frames) < 0:
            raise ConfigError("threads, ordinal and frames must not be negative")
        if config.identity and not re.fullmatch("[0-9a-f]{32}", config.identity):
            raise ConfigError(f"an identity is 32 hex digits, not {config.identity!r}")
        return config


def open_engine(config: AccelConfig, shape: ModelConfig, weights: Weights) -> Engine:
    """The engine that the settings name, with the model packed.  Error: ConfigError, ValueError."""
    if config.device == "cpu":
        return CpuEngine(
            shape, weights, kv_dtype=config.kv_dtype, dtype=config.dtype, numerics=config.numerics,
            threads=config.threads,
        )  # fmt: skip
    from .cuda.engine import CudaEngine
    from .cuda.open import open_device

    device, ops = open_device(config.device, config.ordinal, config.numerics, shape, config.block_tokens)
    return CudaEngine(
        shape, weights, device, ops, kv_dtype=config.kv_dtype, dtype=config.dtype, numerics=config.numerics,
        threads=config.threads, mirror=config.mirror,
    )  # fmt: skip


class AccelBackend:
    """One model on one arena.  Error at construction: ConfigError (another try would end the same way)."""

    def __init__(self, config: AccelConfig, arena: Any, rows: Any, dram: Any = None, gates: Any = None) -> None:
        """arena, rows, dram, gates: shared memory.  Without dram there are no transfers; without gates a pass that names one
        is refused."""
        try:
            shape, weights, metadata = open_model(config.model, config.dtype)
            cache_dir = Path(config.cache_dir) if config.cache_dir else None
            self._fingerprint = fingerprint(metadata.files.weights, shape, cache_dir)
            self._engine = open_engine(config, shape, weights)
            self._frame_bytes = shape.frame_bytes(config.block_tokens, config.kv_dtype)
            frames = memoryview(arena).cast("B")
            self._capacity_frames = config.frames or len(frames) // self._frame_bytes
            if self._capacity_frames == 0:
                raise ConfigError(f"an arena of {len(frames)} bytes cannot hold a frame of {self._frame_bytes}")
            layout = RowLayout(config.slots, config.entries)
            if len(memoryview(rows)) < layout.total_bytes:
                raise ConfigError(
                    f"{len(memoryview(rows))} bytes of page-table rows, {layout} needs {layout.total_bytes}"
                )
            self._prefill: tuple[TimedPrefill, ...] = ()
            self._attached = (arena, PageRows.over(rows, layout), config.block_tokens, self._capacity_frames)
            self._engine.attach(*self._attached)
            if gates is not None:
                if memoryview(gates).nbytes < 8 * GATES:
                    raise ConfigError(f"{memoryview(gates).nbytes} bytes cannot hold {GATES} gates")
                self._engine.attach_gates(gates)
            if config.layers not in (0, shape.layers):
                raise ConfigError(f"the model has {shape.layers} layers, not {config.layers}")
            self._transfers: Carrier | None = None
            self._speed = Speed(0, 0, 0)
            if dram is not None:
                self._transfers = self._engine.carrier(dram, config.dram_device, gates)
                room = memoryview(dram).nbytes // self._transfers.stored_bytes
                if room < config.dram_frames:
                    raise ConfigError(f"the dram arena has room for {room} stored frames, not {config.dram_frames}")
                self._speed = self._transfers.measure()
                if config.identity:
                    self._transfers.identify(bytes.fromhex(config.identity))
        except (ModelError, ValueError, MemoryError) as error:
            raise ConfigError(str(error)) from error
        self._config = config
        self._name = metadata.files.name
        self._frames = frames
        self._vocab = shape.vocab
        self._counters = {
            "passes": 0,
            "sequences": 0,
            "computed_tokens": 0,
            "compute_ns": 0,
            "waited_ns": 0,
            "copied_frames": 0,
            "dropped_frames": 0,
            "refused": 0,
        }

    def probe(self) -> Probe:
        return Probe(
            protocol=PROTOCOL_VERSION,
            kind="accel",
            pid=os.getpid(),
            fingerprint=self._fingerprint,
            capabilities=self._capabilities(),
            capacity_frames=self._capacity_frames,
            frame_bytes=self._frame_bytes,
            alignment_bytes=1,
            vocab_tokens=self._vocab,
            numerics=self._config.numerics,
            # KV depends on the precision of the weights too; the engine's name is part of every block key.
            engine=f"{self._engine.engine}/{self._config.dtype}",
            model=self._name,
            arena=self._engine.arena,
            read_bytes_s=self._speed.read_bytes_s,
            write_bytes_s=self._speed.write_bytes_s,
            latency_ns=self._speed.latency_ns,
            prefill=self._prefill,
        )

    def _capabilities(self) -> tuple[str, ...]:
        return ("exec", "drop") if self._transfers is None else ("exec", "drop", "read", "write")

    def calibrate(self) -> None:
        """Time prefill on frames of its own, for the probe to tell.  Takes about a second; no pass may be running."""
        self._prefill = measure_prefill(self._engine, self._config.block_tokens)
        self._engine.attach(*self._attached)

    def identify(self, digest: bytes) -> None:
        """What every stored frame's header carries from now on.  Error: ValueError unless it has 16 bytes."""
        if self._transfers is not None:
            self._transfers.identify(digest)

    def transfer(self, effect: Transfer) -> TransferDone | None:
        """Copy frames to or from the dram arena.  None: begun (DeepAccelBackend)."""
        if self._transfers is None:
            every = tuple((item, int(E.ENODEV)) for item in range(len(effect.pairs) // 8))
            return TransferDone(effect.device, effect.seq, every, 0, 0)
        return self._transfers.run(effect)

    def execute(self, effect: Exec) -> ExecDone | ExecFailed:
        """One pass.  ExecFailed: refused by the engine's checks (nothing was done), a load that it waited for failed, or
        logits that are not finite."""
        began_ns = time.perf_counter_ns()
        try:
            done = self._run(effect, began_ns)
        except PassRefused as refused:
            code = E.ESTALE if refused.reason is Refusal.STALE else E.EINVAL
            return self._failed(effect, code, str(refused))
        except (LoadFailed, BadLogits) as bad:
            return self._failed(effect, E.EIO, str(bad))
        except MemoryError as error:  # of the device: the pass wanted more than is left, and others may fit
            return self._failed(effect, E.ENOMEM, str(error))
        except ValueError as error:
            return self._failed(effect, E.EINVAL, str(error))
        self._counters["passes"] += 1
        self._counters["sequences"] += len(effect.seqs) // SEQ_BYTES
        self._counters["computed_tokens"] += done.computed_tokens
        self._counters["compute_ns"] += done.compute_ns
        self._counters["waited_ns"] += done.waited_ns
        self._counters["copied_frames"] += len(effect.copies) // 8
        return done

    def copied_frames(self) -> int:
        return self._counters["copied_frames"]

    def drop(self, frames: Sequence[int]) -> None:
        if any(not 0 <= frame < self._capacity_frames for frame in frames):
            raise ValueError(f"a frame outside 0..{self._capacity_frames - 1}")
        self._engine.drop(frames)
        self._counters["dropped_frames"] += len(frames)

    def health(self) -> dict[str, int]:
        moved = {} if self._transfers is None else self._transfers.counters | self._speed._asdict()
        return self._counters | moved

    def _failed(self, effect: Exec, code: E, reason: str) -> ExecFailed:
        self._counters["refused"] += 1
        return ExecFailed(effect.device, effect.seq, code, reason)

    def _run(self, effect: Exec, began_ns: int) -> ExecDone:
        if len(effect.seqs) % SEQ_BYTES or len(effect.tokens) % 4 or len(effect.copies) % 8 or len(effect.gates) % 16:
            raise ValueError("seqs, tokens, copies or gates are not whole records")
        seqs = np.frombuffer(effect.seqs, SEQ_DTYPE)
        tokens = np.frombuffer(effect.tokens, np.int32)
        copies = np.frombuffer(effect.copies, np.int32).reshape(-1, 2)
        ends = np.cumsum(seqs["ntokens"], dtype=np.int64)
        if len(seqs) and (
            seqs["ntokens"].min() < 1
            or ends[-1] != len(tokens)
            or (seqs["token_offset"] != ends - seqs["ntokens"]).any()
        ):
            raise ValueError(f"the sequences' tokens are not the {len(tokens)} tokens of the pass, one after the other")
        histories = _histories(seqs, effect.histories)
        allowed = _masks(seqs, effect.allowed, self._vocab)
        gates = np.frombuffer(effect.gates, np.int64).reshape(-1, 2)
        work = Pass(seqs, tokens, copies, wanted_rows(seqs, tokens), histories, gates, allowed)
        results = self._engine.compute(work)
        return ExecDone(
            effect.device,
            effect.seq,
            results.tokens.tobytes(),
            results.logprobs.tobytes(),
            tuple((top.tokens.tobytes(), top.logprobs.tobytes()) for top in results.tops),
            tuple(scores.tobytes() for scores in results.scores),
            len(tokens),
            time.perf_counter_ns() - began_ns,
            results.waited_ns,
        )


class DeepAccelBackend(AccelBackend):
    """An accel whose transfers go on beside its passes (serve.py, DeepMover): needs a dram arena and a device of its own."""

    _carrier: DeepCarrier

    def __init__(self, config: AccelConfig, arena: Any, rows: Any, dram: Any, gates: Any = None) -> None:
        super().__init__(config, arena, rows, dram, gates)
        assert isinstance(self._transfers, DeepCarrier)
        self._carrier = self._transfers

    def _capabilities(self) -> tuple[str, ...]:
        return (*super()._capabilities(), "layered")

    def fileno(self) -> int:
        return self._carrier.fileno()

    def timeout_ms(self) -> int:
        return -1

    def completed(self) -> list[TransferDone]:
        return self._carrier.completed()


def _histories(seqs: npt.NDArray[Any], given: Sequence[bytes]) -> list[npt.NDArray[np.int32] | None]:
    """One entry per sequence: its tokens before the sampled one where HISTORY is set.  Error: ValueError."""
    carrying = np.flatnonzero(seqs["flags"] & HISTORY)
    if len(carrying) != len(given):
        raise ValueError(f"{len(given)} histories for {len(carrying)} sequences with the HISTORY flag")
    out: list[npt.NDArray[np.int32] | None] = [None] * len(seqs)
    for sequence, history in zip(carrying, given, strict=True):
        tokens = np.frombuffer(history, np.int32)
        length = int(seqs["start"][sequence]) + int(seqs["ntokens"][sequence])
        if len(tokens) != length:
            raise ValueError(f"a history of {len(tokens)} tokens for a context of {length}")
        out[sequence] = tokens
    return out


def _masks(seqs: npt.NDArray[Any], given: Sequence[bytes], vocab: int) -> dict[int, npt.NDArray[np.bool_]]:
    """Of each sequence with ALLOWED: which tokens may be among its alternatives.  Error: ValueError."""
    carrying = np.flatnonzero(seqs["flags"] & ALLOWED)
    if len(carrying) != len(given):
        raise ValueError(f"{len(given)} masks for {len(carrying)} sequences with the ALLOWED flag")
    out: dict[int, npt.NDArray[np.bool_]] = {}
    for sequence, mask in zip(carrying, given, strict=True):
        if len(mask) != -(-vocab // 8):
            raise ValueError(f"a mask of {len(mask)} bytes for a vocabulary of {vocab}")
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab, bitorder="little")
        out[int(sequence)] = bits.view(np.bool_)
    return out


def make_backend(arguments: DriverArguments) -> AccelBackend:
    """Build the backend that a driver's command line describes.  Error: ConfigError."""
    config = AccelConfig.from_json(arguments.config)
    if config.device != "cpu":
        import torch  # the CPU engine does without: it is most of a driver's start

        torch.set_num_threads(1)  # what computes is the device, or in a dry run several drivers on few cores
    arena = map_shared(arguments.arena_fd)
    advise_huge_pages(arena)
    dram = map_shared(config.dram_fd) if config.dram_fd >= 0 else None
    if dram is not None:
        advise_huge_pages(dram)
        populate_aside(dram)
    gates = map_shared(config.gates_fd) if config.gates_fd >= 0 else None
    make = DeepAccelBackend if config.device != "cpu" and dram is not None else AccelBackend
    backend = make(config, arena, cast(Any, map_read_only(arguments.rows_fd)), dram, gates)
    if os.environ.get(EPOCH_VARIABLE) == "1":  # later lives have to be quick, and the kernel knows better by then
        backend.calibrate()
    return backend
