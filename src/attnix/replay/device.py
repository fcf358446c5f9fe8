"""Simulated devices: they take time and move nothing.

`TimedAccel` answers a pass with its completion and the time at which it happens.  It looks at lengths only.

*Decoding in strides.*  When a pass is nothing but decoding and nobody else acts before its end, the passes that follow
are the same again: the kernel would grow each log by a token and send the next.  So one such pass may stand for `steps` of
them: the time of all is charged at once, the KV that every step reads included, and each sequence has produced `steps`
tokens of its answer.  The stride ends at the first step boundary after the next thing that anybody does (an arrival, the
end of a transfer, a timer), and when the first sequence has its whole answer; so arrivals, ends of answers and every pass
with a prompt in it happen when they would have happened.  What is not as it would have been: the log gets one token per
stride instead of `steps`, so that an answer in progress occupies fewer frames (at most its length), and a context that is
preempted in its answer has that much less to compute again.  `exact` makes every stride one step.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from attnix.kernel.batch import SEQ_BYTES
from attnix.kernel.events import Exec, ExecDone

from .profile import Link, Profile
from .workload import STOP_TOKEN

_FIELDS: Final = SEQ_BYTES // 4  # int32 words of a SEQ record; the ones used here, by word:
_SLOT, _START, _NTOKENS, _WRITE_FROM, _FLAGS = 0, 2, 3, 4, 7
_SAMPLE: Final = 1
_NEVER: Final = 1 << 62
Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]


class Pass(NamedTuple):
    """A pass that has begun.

    firsts   slots whose first token it samples
    end_ns   when `done` happens
    """

    done: ExecDone
    end_ns: int
    firsts: tuple[int, ...]


class TimedAccel:
    """The compute device of a profile.

    computed  per slot: tokens whose KV was computed since `begin`, the answer's included; each step of a stride counts
    """

    def __init__(self, profile: Profile, slots: int, *, exact: bool = False) -> None:
        self._k = profile.k_ns
        self._a = profile.a_ns
        self._b = profile.b_ns
        self._r = profile.r_ns
        self._layers = profile.kv.layers
        self._most_steps = 1 if exact else _NEVER
        self._prompt = np.full(slots, _NEVER, np.int64)  # length of the prompt being answered
        self._left = np.ones(slots, np.int64)  # tokens of the answer still to come
        self._unlogged = np.zeros(slots, np.int64)  # tokens of the answer that strides left out of the log
        self._emits = np.zeros(slots, np.int32)
        self.computed: Int64s = np.zeros(slots, np.int64)
        self.prefill_tokens = 0  # of prompts, and of what was lost
        self.busy_ns = 0
        self.waited_ns = 0
        self.passes = 0
        self.steps = 0

    def begin(self, slot: int, prompt_tokens: int, output_tokens: int, emits: int) -> None:
        """A turn: the answer is `output_tokens` long, and in the log its tokens are `emits`."""
        self._prompt[slot] = prompt_tokens
        self._left[slot] = output_tokens
        self._unlogged[slot] = 0
        self._emits[slot] = emits
        self.computed[slot] = 0

    def end(self, slot: int) -> None:
        self._prompt[slot] = _NEVER

    def start(self, work: Exec, now_ns: int, next_ns: int, gates_ns: int = 0) -> Pass:
        """next_ns: when something else happens next.  gates_ns: when the last load that the pass has to wait for is done."""
        seqs = np.frombuffer(work.seqs, np.int32).reshape(-1, _FIELDS)
        slots, start, count = seqs[:, _SLOT], seqs[:, _START], seqs[:, _NTOKENS]
        end = start + count
        total = len(work.tokens) // 4
        prompt = self._prompt[slots]
        steps = 1
        firsts: tuple[int, ...] = ()
        samples = seqs[:, _FLAGS] & _SAMPLE  # a context that is brought back may compute one token and sample none
        if total == len(seqs) and samples.all() and (end > prompt).all():
            steps, spent = self._stride(slots, end, next_ns - now_ns)
            self.computed[slots] += steps
            self._unlogged[slots] += steps - 1
            sampling = slots
        else:
            spent = self._k + self._mixed_ns(slots, start, count)
            computed = end - np.maximum(start, seqs[:, _WRITE_FROM])
            self.computed[slots] += computed
            self.prefill_tokens += int(computed[(count > 1) | (samples == 0) | (end <= prompt)].sum())
            at = np.flatnonzero(samples)
            sampling = slots[at]
            firsts = tuple(sampling[end[at] == prompt[at]].tolist())
        left = self._left[sampling] - steps
        self._left[sampling] = left
        tokens = np.where(left > 0, self._emits[sampling], np.int32(STOP_TOKEN)).astype(np.int32)
        end_ns = now_ns + max(1, round(spent))
        ready_ns = gates_ns + round(spent / self._layers)  # the last layer runs when the last load is there
        waited_ns = max(0, ready_ns - end_ns)
        end_ns += waited_ns
        self.busy_ns += end_ns - now_ns
        self.waited_ns += waited_ns
        self.passes += 1
        self.steps += steps
        step_ns = (end_ns - now_ns) // steps  # the kernel learns from it what one pass costs
        done = ExecDone(
            work.device, work.seq, tokens.tobytes(), bytes(4 * len(tokens)), (), (), total, step_ns, waited_ns
        )
        return Pass(done, end_ns, firsts)

    def _mixed_ns(self, slots: Int32s, start: Int32s, count: Int32s) -> float:
        c = start + self._unlogged[slots]
        prefill = count * (self._a + self._b * (c + count / 2))
        return float(np.where(count > 1, prefill, self._r * (c + 1)).sum())

    def _stride(self, slots: Int32s, end: Int32s, until_ns: int) -> tuple[int, float]:
        """(steps, ns) of a pass in which every sequence decodes.  Step i takes first + i * more."""
        first = self._k + self._r * float((end + self._unlogged[slots]).sum())
        most = min(int(self._left[slots].min()), self._most_steps)
        if most <= 1 or until_ns <= first:
            return 1, first
        more = self._r * len(slots)
        # The fewest steps s with s * first + more * s * (s - 1) / 2 >= until_ns.
        half = first - more / 2
        wanted = ceil((sqrt(half * half + 2 * more * until_ns) - half) / more)
        steps = max(1, min(most, wanted))
        return steps, steps * first + more * steps * (steps - 1) / 2


class TimedLink:
    """One direction of a link: transfers in the order in which they are sent, one at a time."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free_ns = 0
        self.moved_bytes = 0
        self.busy_ns = 0

    def start(self, moved_bytes: int, now_ns: int) -> tuple[int, int]:
        """(when it is done, how long it took once the link was free)."""
        took_ns = max(1, self.link.time_ns(moved_bytes))
        self.free_ns = max(self.free_ns, now_ns) + took_ns
        self.moved_bytes += moved_bytes
        self.busy_ns += took_ns
        return self.free_ns, took_ns
