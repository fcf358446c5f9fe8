"""A whole attnix in one process, without sockets, clocks or torch: the real kernel over simulated devices.

For tests, studies and replay.  Time is a number that only moves when told to; a pass completes only when `tick` says so,
so any interleaving of calls, completions and failures can be written down.

    system = SimulatedSystem(frames=12, block_tokens=4)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([1, 2, 3]))
    print(client.call("generate", ctx, 8).tokens)      # runs the devices until the reply is there
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from attnix.drivers.sim_device import SimDevice
from attnix.drivers.sim_memory import SimTier
from attnix.kernel import calls
from attnix.kernel.batch import SEQ_BYTES
from attnix.kernel.config import DeviceConfig, KernelConfig
from attnix.kernel.coreapi import CoreApi
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import (
    AttachTier,
    Connect,
    DetachTier,
    Disconnect,
    DriverAsleep,
    DriverDown,
    DriverUp,
    Effect,
    Event,
    Exec,
    ExecDone,
    ExecFailed,
    Halt,
    Notify,
    Reply,
    RestartDriver,
    SetTimer,
    SleepDriver,
    Syscall,
    Timer,
    Tokens,
    Transfer,
    TransferDone,
    WakeDriver,
)
from attnix.kernel.geometry import KvShape, RowLayout
from attnix.kernel.step import Kernel
from attnix.kernel.tag import GATE_FAILED, GATES, gate_value, stored_bytes
from attnix.kernel.twin import TwinCore

CoreMaker: TypeAlias = Callable[..., CoreApi]
DeviceMaker: TypeAlias = Callable[
    [int, RowLayout, memoryview], Any
]  # (frames, layout, rows) -> something that executes
Record: TypeAlias = Any  # a result record of kernel/calls.py


def ints(tokens: Iterable[int]) -> bytes:
    """Token ids as they travel."""
    return array("i", tokens).tobytes()


def tokens_of(data: bytes) -> list[int]:
    return array("i", data).tolist()


class SimulatedSystem:
    """frames: of each compute device; dram, nvme, remote: frames of that tier, 0: there is none.  direct: the nvme tier reads
    straight into hbm and passes may follow it through gates.  Tiers are numbered after the compute devices, in that order.

    make_device: what stands for each accel, a SimDevice unless told otherwise.  frames: per device.  check: fsck after every step, and any problem is an AssertionError.

    Public: kernel, devices, pending (passes not yet completed, per device), now_ns, halted, sent (every effect, if kept).
    """

    def __init__(
        self,
        *,
        frames: int = 12,
        dram: int = 0,
        nvme: int = 0,
        remote: int = 0,
        direct: bool = False,
        block_tokens: int = 4,
        window_tokens: int = 64,
        devices: int = 1,
        vocab_tokens: int = 256,
        max_contexts: int = 32,
        stop_tokens: tuple[int, ...] = (),
        core: CoreMaker = TwinCore,
        hash_bits: int = 128,
        check: bool = True,
        sysctl: dict[str, int | str] | None = None,
        script: tuple[int, ...] = (),
        identity: tuple[tuple[str, str], ...] = (("weights", "sim"),),
        kv: KvShape | None = None,
        record: bool = False,
        make_device: DeviceMaker | None = None,
    ) -> None:
        sizes = {"dram": dram, "nvme": nvme, "remote": remote}
        below = [DeviceConfig(f"{kind}0", kind, size) for kind, size in sizes.items() if size]
        config = KernelConfig(
            devices=(*(DeviceConfig(f"hbm{d}", "hbm", frames) for d in range(devices)), *below),
            kv=kv or KvShape(1, 1, 2, 2),
            window_tokens=window_tokens,
            vocab_tokens=vocab_tokens,
            identity=identity,
            block_tokens=block_tokens,
            max_contexts=max_contexts,
            stop_tokens=stop_tokens,
            owner_uid=1000,
            # Time stands still while a client waits here: who wants time to be waited for says so.
            sysctl={"wait.grace_ms": 0, **(sysctl or {})},
        )
        layout = config.layout
        rows = [memoryview(bytearray(layout.total_bytes)) for _ in range(devices)]
        capacities = [d.capacity_frames for d in config.devices]
        self.core = core(bytes(range(16)), block_tokens, layout, capacities, rows, hash_bits)
        self.kernel = Kernel(config, self.core)
        self.gates = bytearray(8 * GATES)
        self.direct = direct
        self._frame_bytes = config.kv.frame_bytes(block_tokens)
        self._block_tokens = block_tokens
        self.dram = bytearray(dram * stored_bytes(self._frame_bytes))
        maker = make_device or (
            lambda f, where, table: SimDevice(
                f, where, table, block_tokens, vocab_tokens, script=script, gates=self.gates
            )
        )
        self.devices: list[Any] = [maker(frames, layout, rows[d]) for d in range(devices)]
        self.devices += [self._tier(d) if d.tier != "dram" else None for d in below]
        self.computes = devices
        self.frames = frames
        self.now_ns = 0
        self.check = check
        self.pending: list[deque[Exec | Transfer]] = [deque() for _ in self.devices]
        self.epochs = [0] * len(self.devices)
        self.timers: list[tuple[int, int]] = []
        self.sleeping: list[int] = []  # compute devices whose driver is stopping
        self.attaching: list[int] = []  # tiers whose driver is starting
        self.clients: dict[int, SimulatedClient] = {}
        self.halted = False
        self.record = record
        self.log: list[tuple[int, Event, list[Effect]]] = []
        self.double_replies: list[tuple[int, int]] = []
        self._next_conn = 0
        for d in range(len(self.devices)):
            if self.devices[d] is not None:
                self.driver_up(d)

    def _tier(self, config: DeviceConfig) -> SimTier:
        return SimTier(config.capacity_frames, self._frame_bytes, self._block_tokens, gates=self.gates)

    # -- events in, effects out -----------------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        self.now_ns += 1
        effects = self.kernel.step(event, self.now_ns)
        if self.record:
            self.log.append((self.now_ns, event, effects))
        for effect in effects:
            self._perform(effect)
        if self.check:
            problems = self.kernel.fsck()
            assert not problems, f"after {type(event).__name__}: " + "; ".join(problems)
        return effects

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, (Exec, Transfer)):
            self.pending[effect.device].append(effect)
        elif isinstance(effect, AttachTier):
            tier = self._tier(DeviceConfig(effect.name, effect.kind, effect.capacity_frames))
            while effect.device >= len(self.devices):
                self.devices.append(None)
                self.pending.append(deque())
                self.epochs.append(0)
            self.devices[effect.device] = tier
            self.attaching.append(effect.device)
        elif isinstance(effect, SleepDriver):
            self.devices[effect.device].arena[:] = bytes(len(self.devices[effect.device].arena))
            self.sleeping.append(effect.device)
        elif isinstance(effect, WakeDriver):
            self.attaching.append(effect.device)
        elif isinstance(effect, DetachTier):
            self.devices[effect.device] = None
        elif isinstance(effect, Reply):
            client = self.clients.get(effect.conn)
            if client is not None:
                if effect.request in client.replies or effect.request not in client.sent:
                    self.double_replies.append((effect.conn, effect.request))
                client.replies[effect.request] = effect
        elif isinstance(effect, Tokens):
            streams = array("q", effect.streams)
            for i, token in enumerate(array("i", effect.tokens)):
                client = self.clients.get(streams[2 * i])
                if client is not None:
                    client.streamed.setdefault(streams[2 * i + 1], []).append(token)
        elif isinstance(effect, Notify):
            if effect.conn in self.clients:
                self.clients[effect.conn].notices.append((effect.kind, effect.record))
        elif isinstance(effect, SetTimer):
            self.timers.append((effect.at_ns, effect.timer))
        elif isinstance(effect, RestartDriver):
            self.kill_driver(effect.device, wrote_kv=False)
        elif isinstance(effect, Halt):
            self.halted = True

    # -- devices --------------------------------------------------------------------------------------------------

    def tick(self, device: int = 0) -> bool:
        """Complete the oldest pass or transfer of a device.  False: there is none, or it waits at a gate."""
        if self.sleeping:
            self.step(DriverAsleep(self.sleeping.pop()))
            return True
        if self.attaching:
            self.driver_up(self.attaching.pop())
            return True
        if not self.pending[device]:
            return False
        effect = self.pending[device][0]
        if isinstance(effect, Exec) and not self.devices[device].is_open(effect):
            return False
        self.pending[device].popleft()
        self.step(self.perform(effect))
        return True

    def perform(self, effect: Exec | Transfer) -> ExecDone | ExecFailed | TransferDone:
        """What a device answers."""
        device = self.devices[effect.device]
        if isinstance(effect, Exec):
            done: ExecDone | ExecFailed = device.execute(effect)
            return done
        moved: TransferDone
        if isinstance(device, SimTier) and effect.arena < self.computes:
            moved = device.transfer_direct(effect, self.devices[effect.arena].arena)
        else:
            moved = device.transfer(effect, self.dram)
        return moved

    def fail(self, device: int = 0, reason: str = "injected") -> bool:
        """The oldest pass or transfer fails and touches nothing."""
        if not self.pending[device]:
            return False
        effect = self.pending[device].popleft()
        if isinstance(effect, Exec):
            self.step(ExecFailed(device, effect.seq, E.EIO, reason))
        else:
            if effect.gate >= 0:  # a driver says so there before it says how the transfer ended
                memoryview(self.gates).cast("q")[effect.gate] = gate_value(effect.ticket, GATE_FAILED)
            failed = tuple((k, int(E.EIO)) for k in range(len(effect.pairs) // 8))
            self.step(TransferDone(device, effect.seq, failed, 0, 0))
        return True

    def repeat(self, done: ExecDone | TransferDone) -> None:
        """A completion arrives once more, late."""
        self.step(done)

    def driver_up(self, device: int, arena: str = "kept") -> None:
        self.epochs[device] += 1
        driver = self.devices[device]
        if isinstance(driver, SimTier):
            direct = ("direct",) if self.direct else ()
            self.step(driver.found(device, self.epochs[device]))
            self.step(DriverUp(device, self.epochs[device], 200 + self.epochs[device], "lost", "sim", direct))
            return
        if arena == "lost":
            driver.arena[:] = bytes([0xA5]) * len(driver.arena)
        self.step(DriverUp(device, self.epochs[device], 100 + self.epochs[device], arena))

    def kill_driver(self, device: int = 0, wrote_kv: bool = True, arena: str = "kept") -> None:
        """The driver dies with whatever it was running, before or after it wrote KV, and comes back."""
        if self.pending[device] and wrote_kv:
            self.perform(self.pending[device][0])
        gates = memoryview(self.gates).cast("q")
        for effect in self.pending[device]:
            if isinstance(effect, Transfer) and effect.gate >= 0:  # as the supervisor does: nobody else would
                gates[effect.gate] = max(gates[effect.gate], gate_value(effect.ticket, GATE_FAILED))
        self.pending[device].clear()
        self.step(DriverDown(device, self.epochs[device], "killed by test"))
        self.driver_up(device, arena)

    def run(self, until: Callable[[], bool] | None = None, limit: int = 100_000) -> int:
        """Complete passes round robin until nothing is pending, or until() holds.  Returns the passes run."""
        passes = 0
        while passes < limit and not (until is not None and until()):
            if not any(self.tick(d) for d in range(len(self.devices))):
                return passes
            passes += 1
        if passes >= limit:
            raise AssertionError(f"no end after {limit} passes: live-lock")
        return passes

    def advance(self, ns: int) -> None:
        """Let time pass and timers fire."""
        self.now_ns += ns
        due = sorted(t for t in self.timers if t[0] <= self.now_ns)
        self.timers = [t for t in self.timers if t[0] > self.now_ns]
        for _, timer in due:
            self.step(Timer(timer))

    def available(self, device: int = 0) -> int:
        """Frames that are free or can be had by eviction."""
        return self.core.free_frames(device) + self.core.reclaimable_frames(device)

    @property
    def sequences_pending(self) -> int:
        return sum(len(e.seqs) // SEQ_BYTES for q in self.pending for e in q if isinstance(e, Exec))

    # -- clients --------------------------------------------------------------------------------------------------

    def connect(self, uid: int = 1000, hello: bool = True) -> SimulatedClient:
        self._next_conn += 1
        client = SimulatedClient(self, self._next_conn, uid)
        self.clients[client.conn] = client
        self.step(Connect(client.conn, uid, uid, 1))
        if hello:
            client.call("hello", "test", 1)
        return client

    def disconnect(self, client: SimulatedClient) -> None:
        self.step(Disconnect(client.conn))


class SimulatedClient:
    """One connection.  `post` sends and returns the request id; `call` also runs devices until the reply is there."""

    def __init__(self, system: SimulatedSystem, conn: int, uid: int) -> None:
        self.system = system
        self.conn = conn
        self.uid = uid
        self.sent: set[int] = set()
        self.replies: dict[int, Reply] = {}
        self.streamed: dict[int, list[int]] = {}
        self.notices: list[tuple[str, Record]] = []  # notifications other than tokens
        self._request = 0

    def post(self, name: str, *args: object) -> int:
        self._request += 1
        self.sent.add(self._request)
        self.system.step(Syscall(self.conn, self._request, name, ARGUMENTS[name](*args)))
        return self._request

    def call(self, name: str, *args: object) -> Record:
        request = self.post(name, *args)
        self.system.run(until=lambda: request in self.replies)
        return self.result(request)

    def result(self, request: int) -> Record:
        """The reply, as its record.  Errno when it is an error; KeyError when there is none yet."""
        reply = self.replies[request]
        if reply.code:
            detail = dict(reply.result) if isinstance(reply.result, dict) else {}
            message = str(detail.pop("message", ""))
            raise Errno(E(reply.code), message, **detail)
        return reply.result


ARGUMENTS: dict[str, Callable[..., tuple[object, ...]]] = {
    "hello": calls.HelloArgs,
    "spawn": calls.SpawnArgs,
    "exit": calls.ExitArgs,
    "kill": calls.KillArgs,
    "wait": calls.WaitArgs,
    "ps": calls.PsArgs,
    "getrusage": calls.GetrusageArgs,
    "setpriority": calls.SetpriorityArgs,
    "setlimit": calls.SetlimitArgs,
    "groups": calls.GroupsArgs,
    "alloc_context": calls.AllocContextArgs,
    "fork": calls.ForkArgs,
    "append": calls.AppendArgs,
    "truncate": calls.TruncateArgs,
    "release": calls.CtxArgs,
    "stat": calls.LookArgs,
    "pagemap": calls.LookArgs,
    "generate": calls.GenerateArgs,
    "forward": calls.ForwardArgs,
    "score": calls.ScoreArgs,
    "cancel": calls.CancelArgs,
    "uname": calls.Empty,
    "tiers": calls.Empty,
    "vmstat": calls.Empty,
    "sysctl": calls.SysctlArgs,
    "fsck": calls.Empty,
    "sleep": calls.Empty,
    "wake": calls.Empty,
    "pin": calls.PinArgs,
    "unpin": calls.LookArgs,
    "advise": calls.AdviseArgs,
    "prefetch": calls.PrefetchArgs,
    "demote": calls.DemoteArgs,
    "evict": calls.LookArgs,
    "explain": calls.ExplainArgs,
    "attach_tier": calls.AttachTierArgs,
    "detach_tier": calls.DetachTierArgs,
    "dmesg": calls.DmesgArgs,
    "shutdown": calls.Empty,
    "publish": calls.PublishArgs,
    "open": calls.OpenArgs,
    "unlink": calls.UnlinkArgs,
    "names": calls.NamesArgs,
    "detach": calls.CtxArgs,
    "reattach": calls.ReattachArgs,
    "snapshot": calls.SnapshotArgs,
    "restore": calls.RestoreArgs,
    "wait_tool": calls.WaitToolArgs,
    "resume": calls.ResumeArgs,
    "pressure": calls.PressureArgs,
    "health": calls.HealthArgs,
    "frames": calls.FramesArgs,
    "read": calls.ReadArgs,
    "trace": calls.TraceArgs,
    "inject": calls.InjectArgs,
}
