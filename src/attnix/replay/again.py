"""`attnix replay LOG`: a recorded run once more, step by step, against what the kernel did then.

A fresh kernel with its core in C is fed the same events at the same times.  Nothing runs that could differ: no driver, no
client, no clock.  Every step's effects are compared by digest; the first that differs is named, with the effects as they
are now and the steps that led to it.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from attnix.kernel.core import Core
from attnix.kernel.evict import registry
from attnix.kernel.look import vmstat
from attnix.kernel.step import Kernel
from attnix.recording import Header, Recording, Step, digest_of

_SHOWN_STEPS: Final = 5
_SHOWN_CHARS: Final = 400


@dataclass
class Outcome:
    """steps: fed to the kernel.  differs_at: number of the first step that differs, from 0; -1: all are the same.

    events, effects  how many of each kind
    """

    steps: int = 0
    differs_at: int = -1
    difference: list[str] = field(default_factory=list)
    cut_short: bool = False
    panicked: bool = False
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps, "same": self.differs_at < 0, "differs_at": self.differs_at, "difference": self.difference,
            "cut_short": self.cut_short, "panicked": self.panicked, "seconds": self.seconds,
            "events": dict(sorted(self.events.items())), "effects": dict(sorted(self.effects.items())),
            "counters": self.counters,
        }  # fmt: skip


def fresh_kernel(header: Header) -> Kernel:
    """As boot made it.  RuntimeError: policies that are not installed here."""
    missing = sorted(set(header.policies) - set(registry.names()))
    if missing:
        raise RuntimeError(f"the recorded run had eviction policies that are not here: {', '.join(missing)}")
    config = header.config
    computes = sum(1 for d in config.devices if d.tier == "hbm")
    rows = [memoryview(bytearray(config.layout.total_bytes)) for _ in range(computes)]
    capacities = [d.capacity_frames for d in config.devices]
    return Kernel(config, Core(header.secret, config.block_tokens, config.layout, capacities, rows))


def replay(path: Path, *, check: bool = False) -> Outcome:
    """check: fsck after every step; a problem counts as a difference.  BadRecording, OSError, RuntimeError."""
    recording = Recording(path)
    kernel = fresh_kernel(recording.header)
    outcome = Outcome()
    before: deque[Step] = deque(maxlen=_SHOWN_STEPS)
    first_ns = last_ns = -1
    for step in recording.steps():
        outcome.events[type(step.event).__name__] += 1
        first_ns, last_ns = first_ns if first_ns >= 0 else step.now_ns, step.now_ns
        difference = list(_differs(kernel, step, outcome, check))
        if difference:
            outcome.differs_at = outcome.steps
            outcome.difference = difference + [f"before it: {_text(s)}" for s in reversed(before)]
            break
        outcome.steps += 1
        before.append(step)
    outcome.cut_short = recording.cut_short
    outcome.seconds = round((last_ns - first_ns) / 1e9, 6)
    outcome.counters = vmstat(kernel.machine)
    return outcome


def told(path: Path, outcome: Outcome, took_s: float) -> str:
    """For people."""
    lines = [f"{path}: {outcome.steps:,} steps over {outcome.seconds:,.1f} s, decided again in {took_s:.1f} s"]
    lines.append("  events   " + ", ".join(f"{n:,} {name}" for name, n in outcome.events.most_common()))
    lines.append("  effects  " + ", ".join(f"{n:,} {name}" for name, n in outcome.effects.most_common()))
    if outcome.cut_short:
        lines.append(
            "  the file is torn: it ends inside a record, so the daemon did not end in order and what came then is lost"
        )
    if outcome.differs_at < 0:
        which = f"of the {outcome.steps:,} steps that are left" if outcome.cut_short else "of every step"
        return "\n".join([*lines, f"every effect {which} is the same, to the byte"])
    return "\n".join([*lines, f"step {outcome.differs_at:,} is the first that differs:", *outcome.difference])


def _differs(kernel: Kernel, step: Step, outcome: Outcome, check: bool) -> Iterator[str]:
    """What is not as it was, in lines; nothing when all is."""
    try:
        effects = kernel.step(step.event, step.now_ns)
    except Exception as error:
        outcome.panicked = True
        if step.digest:
            yield f"the kernel panics here and did not then: {type(error).__name__}: {error}"
            yield from traceback.format_exception(error)[-1].splitlines()
            yield _text(step)
        return
    if not step.digest:
        yield "the kernel panicked here then and does not now"
        yield _text(step)
    elif digest_of(effects) != step.digest:
        yield f"other effects than then for {_text(step)}"
        yield from (f"now: {_short(effect)}" for effect in effects)
        if not effects:
            yield "now: no effects"
    problems = kernel.fsck() if check else []
    if problems:
        yield f"after {_text(step)}"
        yield from problems
    outcome.effects.update(type(effect).__name__ for effect in effects)


def _text(step: Step) -> str:
    return f"t={step.now_ns} {_short(step.event)}"


def _short(record: object) -> str:
    text = repr(record)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text):,} characters)"
