"""Drivers that misbehave on purpose, deterministically: every way a driver can fail, for the kernel's and our own tests.

Two wrappers share one plan:

- `FaultyDevice` around a device inside the process (the kernel's state-machine tests);
- `FaultyChannel` inside any driver process, switched on by ATTNIX_DRIVER_FAULTS (a JSON plan): `Channel.from_fd` returns
  it, so that the accel that ships can be made to fail without a line of test code in it.

The plan names passes by number, counted from 0 in each life of the driver, or draws faults from a seed.  With other
`verbs` it is transfers, or both, that are counted and that fail.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed

from .channel import EPOCH_VARIABLE, FAULTS_VARIABLE, Channel
from .memfd import map_shared


class Fault(StrEnum):
    """What goes wrong with one pass, or one transfer."""

    FAIL = "fail"  # answered "failed", nothing computed
    HANG = "hang"  # never answered, and nothing after it either: the process lives and does not react
    LOSE = "lose"  # computed, KV written, the answer is lost; later passes are answered
    TWICE = "twice"  # answered twice
    LATE = "late"  # answered only after the next pass has been answered
    DIE_BEFORE = "die_before"  # killed before any KV is written
    DIE_AFTER = "die_after"  # killed after the KV is written, before the answer
    FLIP = "flip"  # answered rightly, but one bit of the arena has changed
    SLOW = "slow"  # answered after a delay
    GARBAGE = "garbage"  # answered with something that is no message


class FaultPlan(NamedTuple):
    """Which pass of which life meets which fault.

    faults   exact faults: (epoch, pass) -> Fault; epoch 0 means every life
    seed, rate_permille, kinds  besides these, a pass meets a fault with this probability, one of `kinds` (seeded)
    slow_ns  how late SLOW is
    verbs    of the messages that are counted (FaultyChannel only)
    """

    faults: Mapping[tuple[int, int], Fault] = {}
    seed: int = 0
    rate_permille: int = 0
    kinds: tuple[Fault, ...] = ()
    slow_ns: int = 50_000_000
    verbs: tuple[str, ...] = ("exec",)

    def fault_of(self, epoch: int, number: int) -> Fault | None:
        """The fault that pass `number` of life `epoch` meets, if any; the same answer every time."""
        exact = self.faults.get((epoch, number)) or self.faults.get((0, number))
        if exact is not None or not self.kinds:
            return exact
        draw = self.draw(epoch, number)
        return self.kinds[draw // 1000 % len(self.kinds)] if draw % 1000 < self.rate_permille else None

    def draw(self, epoch: int, number: int) -> int:
        """A number that depends on the seed, the life and the pass only."""
        digest = hashlib.blake2b(struct.pack("<QQQ", self.seed, epoch, number), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def to_json(self) -> str:
        """The value of ATTNIX_DRIVER_FAULTS that means this plan."""
        return json.dumps(
            {
                "faults": [[epoch, number, str(fault)] for (epoch, number), fault in self.faults.items()],
                "seed": self.seed,
                "rate_permille": self.rate_permille,
                "kinds": [str(kind) for kind in self.kinds],
                "slow_ns": self.slow_ns,
                "verbs": list(self.verbs),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        plan = json.loads(text)
        faults = {(int(epoch), int(number)): Fault(fault) for epoch, number, fault in plan.pop("faults", ())}
        kinds = tuple(Fault(kind) for kind in plan.pop("kinds", ()))
        verbs = tuple(str(verb) for verb in plan.pop("verbs", ("exec",)))
        return cls(faults=faults, kinds=kinds, verbs=verbs, **plan)

    def environment(self) -> dict[str, str]:
        """What to add to the environment of a driver process."""
        return {FAULTS_VARIABLE: self.to_json()}


class Device(Protocol):
    """What FaultyDevice wraps; SimDevice is one."""

    arena: memoryview

    def execute(self, effect: Exec) -> ExecDone | ExecFailed: ...


class FaultyDevice:
    """A device inside this process that fails as planned.

    dead  the device has died (or hangs, which its supervisor turns into a death): the owner reports DriverDown, and
          `revive` starts its next life, with the arena as the dead one left it
    """

    def __init__(self, device: Device, plan: FaultPlan) -> None:
        self.device = device
        self.plan = plan
        self.epoch = 1
        self.dead = False
        self.met: list[tuple[int, int, Fault]] = []  # (epoch, pass, fault), in order
        self._number = 0
        self._held: list[ExecDone | ExecFailed] = []

    def submit(self, effect: Exec) -> list[ExecDone | ExecFailed]:
        """Run a pass; the completions that arrive now, in order.

        None may arrive (LOSE, LATE, or `dead`), two may (TWICE), and a late one of an earlier pass may come along.
        """
        if self.dead:
            return []
        number, self._number = self._number, self._number + 1
        fault = self.plan.fault_of(self.epoch, number)
        if fault is not None:
            self.met.append((self.epoch, number, fault))
        late, self._held = self._held, []
        if fault is Fault.FAIL:
            return [ExecFailed(effect.device, effect.seq, E.EIO, "planned fault"), *late]
        if fault in (Fault.HANG, Fault.DIE_BEFORE):
            self.dead = True
            return []
        outcome = self.device.execute(effect)
        if fault in (Fault.DIE_AFTER, Fault.GARBAGE):  # a supervisor kills a driver that talks garbage
            self.dead = True
            return []
        if fault is Fault.LOSE:
            return late
        if fault is Fault.LATE:
            self._held = [outcome]
            return late
        if fault is Fault.FLIP:
            _flip(self.device.arena, self.plan.draw(self.epoch, number))
        return [outcome, outcome, *late] if fault is Fault.TWICE else [outcome, *late]

    def revive(self) -> int:
        """Start the next life; its epoch.  Answers that the last life still held are gone."""
        self.dead = False
        self.epoch += 1
        self._number = 0
        self._held = []
        return self.epoch


class FaultyChannel(Channel):
    """A driver's end of the channel that injects the faults of ATTNIX_DRIVER_FAULTS into passes or transfers and
    their answers."""

    def __init__(self, sock: socket.socket, arena_fd: int | None) -> None:
        super().__init__(sock)
        self._plan = FaultPlan.from_json(os.environ[FAULTS_VARIABLE])
        self._epoch = int(os.environ.get(EPOCH_VARIABLE, "1"))
        self._arena = None if arena_fd is None else map_shared(arena_fd)
        self._number = 0
        self._fault_of: dict[tuple[bool, int], tuple[int, Fault]] = {}  # by (transfer, seq)
        self._held: list[list[Any]] = []

    def recv(self) -> list[Any] | None:
        while True:
            message = super().recv()
            if message is None or message[0] not in self._plan.verbs:
                return message
            number, self._number = self._number, self._number + 1
            fault = self._plan.fault_of(self._epoch, number)
            if fault is Fault.FAIL:
                super().send(_failure(message))
                continue
            if fault is Fault.HANG:
                while True:
                    signal.pause()
            if fault is Fault.DIE_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault is not None:
                self._fault_of[message[0] != "exec", message[1]] = (number, fault)
            return message

    def send(self, message: list[Any] | tuple[Any, ...]) -> bool:
        if message[0] not in ("done", "failed", "moved"):
            return super().send(message)
        number, fault = self._fault_of.pop((message[0] == "moved", message[1]), (0, None))
        late, self._held = self._held, []
        match fault:
            case Fault.LOSE:
                answers: list[list[Any]] = []
            case Fault.LATE:
                answers, self._held = [], [list(message)]
            case Fault.TWICE:
                answers = [list(message)] * 2
            case Fault.GARBAGE:
                answers = [[message[0], message[1], "garbage"]]
            case Fault.DIE_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
                answers = []
            case Fault.SLOW:
                time.sleep(self._plan.slow_ns / 1e9)
                answers = [list(message)]
            case Fault.FLIP:
                if self._arena is None:
                    raise RuntimeError("a bit flip needs the arena: pass arena_fd to Channel.from_fd")
                _flip(memoryview(self._arena), self._plan.draw(self._epoch, number))
                answers = [list(message)]
            case _:
                answers = [list(message)]
        for answer in answers + late:
            super().send(answer)
        return self.bytes_queued == 0


def _failure(message: list[Any]) -> list[Any]:
    """The answer to a pass or transfer that did nothing."""
    if message[0] == "exec":
        return ["failed", message[1], int(E.EIO), "planned fault"]
    items = len(message[3]) // 8
    return ["moved", message[1], [[item, int(E.EIO)] for item in range(items)], 0, 0]


def _flip(arena: memoryview, draw: int) -> None:
    bit = draw % (8 * len(arena))
    arena[bit // 8] ^= 1 << bit % 8
