"""The simulated accel: `SimDevice` for tests inside one process, and the same behind the whole driver protocol.

    python -m attnix.drivers.sim --channel FD --arena FD --rows FD --config JSON

Configuration (a JSON object): slots, entries (the row layout, required), block_tokens, vocab, model, script,
ns_per_token, ns_per_pass, numerics, layers (of a stored frame), prefill (what its probe tells as timed passes, whatever
passes really take); with tiers also dram_fd, dram_device, dram_frames and gates_fd.  The capacity is what fits into the arena.  Times are really slept here.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Transfer, TransferDone
from attnix.kernel.geometry import RowLayout
from attnix.kernel.params import BLOCK_TOKENS

from .channel import BadMessage
from .memfd import map_read_only, map_shared, memfd_bytes
from .messages import decode_prefill
from .protocol import PROTOCOL_VERSION, Probe, TimedPrefill
from .serve import ConfigError, DriverArguments, run_driver
from .sim_device import SimDevice
from .sim_model import (
    DEFAULT_VOCAB,
    GREEDY,
    KV_BYTES,
    SamplingChoice,
    reference_distribution,
    reference_entries,
    reference_scores,
    reference_tokens,
)

__all__ = [
    "DEFAULT_VOCAB",
    "GREEDY",
    "KV_BYTES",
    "SamplingChoice",
    "SimBackend",
    "SimDevice",
    "reference_distribution",
    "reference_entries",
    "reference_scores",
    "reference_tokens",
]

_GATE_POLL_S = 0.0001
_SETTINGS = {
    "slots": int, "entries": int, "block_tokens": int, "vocab": int, "model": str,
    "script": list, "ns_per_token": int, "ns_per_pass": int, "numerics": str, "layers": int, "prefill": list,
    "dram_fd": int, "dram_device": int, "dram_frames": int, "gates_fd": int,
}  # fmt: skip


class SimBackend:
    """A SimDevice as a driver backend."""

    def __init__(
        self,
        device: SimDevice,
        numerics: str,
        dram: mmap.mmap | None = None,
        dram_device: int = -1,
        prefill: tuple[TimedPrefill, ...] = (),
    ) -> None:
        self._device = device
        self._numerics = numerics
        self._dram = dram
        self._dram_device = dram_device
        self._prefill = prefill

    def probe(self) -> Probe:
        device = self._device
        return Probe(
            protocol=PROTOCOL_VERSION,
            kind="sim",
            pid=os.getpid(),
            fingerprint=device.fingerprint,
            capabilities=("exec", "drop") if self._dram is None else ("exec", "drop", "read", "write"),
            capacity_frames=device.capacity_frames,
            frame_bytes=device.frame_bytes,
            alignment_bytes=KV_BYTES,
            vocab_tokens=device.vocab,
            numerics=self._numerics,
            engine="sim/blake2b",
            model=device.model,
            stored_bytes=device.format.stored_bytes,
            prefill=self._prefill,
        )

    def identify(self, identity: bytes) -> None:
        self._device.identify(identity)

    def transfer(self, effect: Transfer) -> TransferDone:
        if self._dram is None or effect.arena != self._dram_device:
            failed = tuple((item, int(E.EINVAL)) for item in range(len(effect.pairs) // 8))
            return TransferDone(effect.device, effect.seq, failed, 0, 0)
        began_ns = time.monotonic_ns()
        done = self._device.transfer(effect, self._dram)
        return done._replace(elapsed_ns=time.monotonic_ns() - began_ns)

    def execute(self, effect: Exec) -> ExecDone | ExecFailed:
        self._device.computed.clear()  # a log for tests in one process; here it would only grow
        began_ns = time.monotonic_ns()
        while not self._device.is_open(effect):  # the load that it waits for comes from another driver
            time.sleep(_GATE_POLL_S)
        waited_ns = time.monotonic_ns() - began_ns if effect.gates else 0
        outcome = self._device.execute(effect)
        if isinstance(outcome, ExecFailed):
            return outcome
        return outcome._replace(compute_ns=outcome.compute_ns + waited_ns, waited_ns=waited_ns)

    def copied_frames(self) -> int:
        return self._device.copied_frames

    def drop(self, frames: Sequence[int]) -> None:
        self._device.drop(frames)

    def health(self) -> dict[str, int]:
        device = self._device
        return {
            "passes": device.passes,
            "computed_tokens": device.computed_tokens,
            "copied_frames": device.copied_frames,
            "dropped_frames": device.dropped_frames,
            "refused": device.refused,
            "sealed_frames": device.sealed_frames,
            "unsealed_frames": device.unsealed_frames,
            "corrupt": device.corrupt,
        }


def make_backend(arguments: DriverArguments) -> SimBackend:
    """Build the device that the command line describes.  Error: ConfigError."""
    config = _checked(arguments.config)
    block_tokens = config.get("block_tokens", BLOCK_TOKENS)
    capacity_frames = memfd_bytes(arguments.arena_fd) // (block_tokens * KV_BYTES)
    try:
        device = SimDevice(
            capacity_frames,
            RowLayout(config["slots"], config["entries"]),
            map_read_only(arguments.rows_fd),
            block_tokens,
            config.get("vocab", DEFAULT_VOCAB),
            arena=map_shared(arguments.arena_fd),
            model=config.get("model", "sim"),
            script=config.get("script", ()),
            ns_per_token=config.get("ns_per_token", 0),
            ns_per_pass=config.get("ns_per_pass", 0),
            wait=lambda ns: time.sleep(ns / 1e9),
            layers=config.get("layers", 1),
            gates=map_shared(config["gates_fd"]) if "gates_fd" in config else None,
        )
        prefill = decode_prefill(config.get("prefill", ()))
    except (ValueError, BadMessage) as error:
        raise ConfigError(str(error)) from error
    dram = map_shared(config["dram_fd"]) if "dram_fd" in config else None
    return SimBackend(device, config.get("numerics", "invariant"), dram, config.get("dram_device", -1), prefill)


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    for name, value in config.items():
        kind = _SETTINGS.get(name)
        if kind is None:
            raise ConfigError(f"unknown setting {name!r}; there are {', '.join(_SETTINGS)}")
        if not isinstance(value, kind):
            raise ConfigError(f"setting {name!r} must be {kind.__name__}, not {value!r}")
    for name in ("slots", "entries"):
        if name not in config:
            raise ConfigError(f"setting {name!r} is required: it says how the page-table rows lie in their memfd")
    return config


def main(argv: Sequence[str] | None = None) -> None:
    run_driver("attnix.drivers.sim", make_backend, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
