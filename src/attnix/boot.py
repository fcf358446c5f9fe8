"""Boot: the only module that imports every layer.  Starts the drivers, makes the kernel, serves the socket.

    python -m attnix.boot --model PATH|NAME|sim [--socket PATH] [--hbm 256MiB] ...

Order: take the socket (a second daemon fails before anything is loaded), read the model's geometry, start the text
worker and one accel driver per device, then the drivers of slower tiers (their frames carry the identity that the accels
know), make the kernel out of what the probes say, then accept.  Prints one line, `attnix: ready on SOCKET`, when it does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import uvloop

from attnix import __version__
from attnix.boot_device import (
    DEFAULT_BYTES,
    DEVICE_VARIABLE,
    DEVICES,
    STUB_BYTES,
    Device,
    HbmSize,
    choose,
    hbm_bytes,
    parse_hbm,
)
from attnix.boot_groups import read_limits
from attnix.boot_sysctl import DEFAULTS
from attnix.boot_tiers import (
    TierDrivers,
    TierRequest,
    default_dram_bytes,
    identity_digest,
    name_tiers,
    parse_bytes,
    parse_nvme,
    parse_remote,
    parse_sim_tier,
)
from attnix.drivers.accel.config import KvDtype, ModelConfig
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.accel.model_files import ModelError
from attnix.drivers.dram import DramSpec, machine_bytes
from attnix.drivers.protocol import Probe
from attnix.drivers.spec import DriverSpec, driver_argv
from attnix.drivers.supervisor import DriverStartError, Supervisor
from attnix.durable import Durable, open_durable
from attnix.kernel.config import DeviceConfig, GroupLimit, KernelConfig
from attnix.kernel.core import Core
from attnix.kernel.coreapi import CoreApi
from attnix.kernel.errors import Errno
from attnix.kernel.events import Bug, Event
from attnix.kernel.evict import registry
from attnix.kernel.geometry import KvShape, RowLayout
from attnix.kernel.params import BLOCK_TOKENS, MAX_CONTEXTS, MAX_DEVICES
from attnix.kernel.step import Kernel
from attnix.kernel.sysctl import Sysctl
from attnix.plugins import register_policies
from attnix.recording import Header, Recorder
from attnix.syscalls import systemd
from attnix.syscalls.daemon import Daemon
from attnix.syscalls.listen import CannotListen, Listener
from attnix.syscalls.paths import default_socket_path, home_dir
from attnix.syscalls.textservice import TextService, TextUnavailable

SIM_VOCAB: Final = 256
KEY_FORMAT: Final = "1"
_SECRET_BYTES: Final = 16
_STOPPED: Final = (signal.SIGTERM, signal.SIGINT)


class BootError(Exception):
    """The system cannot start; the message says why and what to do."""


class Options(NamedTuple):
    """What `attnix boot` was asked for; one field per flag."""

    model: str
    socket: str
    hbm: HbmSize
    accels: int
    block_tokens: int
    window_tokens: int
    max_contexts: int
    dtype: str
    kv_dtype: str
    numerics: str
    threads: int
    sharing: str
    state_dir: str
    sim: str
    sysctl: tuple[str, ...]
    dram_bytes: int = 0
    tiers: tuple[TierRequest, ...] = ()  # below dram
    tier_write: str = ""
    record: str = ""  # file; "": none
    socket_group: str = ""  # whose members may connect too
    device: str = "auto"
    groups: str = ""  # file of limits; "": none


class Shape(NamedTuple):
    """What a model's geometry decides before any driver runs."""

    name: str
    path: str  # "" for the simulated model
    architecture: str
    kv: KvShape
    window_tokens: int
    vocab_tokens: int
    rope: str
    config: ModelConfig | None = None


def state_dir() -> Path:
    """Where the secret lies."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(os.environ.get("ATTNIX_STATE") or Path(base) / "attnix")


def resolve_model(name: str) -> str:
    """A path as it is, or the file of a pulled model.  Error: BootError."""
    if os.path.exists(name):
        return name
    folder = home_dir() / "models" / name
    if folder.is_dir():
        files = sorted(folder.glob("*.gguf"))
        return str(files[0] if files else folder)
    raise BootError(f"no model {name!r}: neither a path nor a pulled model; `attnix pull smollm2` gets the default one")


def read_secret(directory: Path) -> bytes:
    """The 16-byte key of the block-key hash, made at the first boot; mode 0600 in a directory of mode 0700.

    It appears whole or not at all: a full disk leaves no half of it, and two first boots agree.  Error: BootError.
    """
    path = directory / "secret"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_secret(path)
        secret = path.read_bytes()
    except OSError as error:
        raise BootError(f"the state directory {directory} cannot be used: {error.strerror}; see --state-dir") from error
    if len(secret) != _SECRET_BYTES:
        raise BootError(
            f"{path} is not {_SECRET_BYTES} bytes long: remove it and boot again (cached keys will not match)"
        )
    return secret


def _make_secret(path: Path) -> None:
    temporary = path.with_name(f"secret.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another boot was quicker: its secret is as good
            os.link(temporary, path)
    finally:
        temporary.unlink()


def check_memory(options: Options, frames_bytes: int, layout: RowLayout, dram: DramSpec | None) -> None:
    """BootError when frames and page tables cannot fit, rather than being killed for memory once they are written.

    frames_bytes  of one accel, in this machine's memory
    """
    dram_bytes = 0 if dram is None else dram.arena_bytes
    wanted = options.accels * (frames_bytes + layout.total_bytes) + dram_bytes
    limit = machine_bytes()
    if wanted > limit:
        raise BootError(
            f"frames ({options.accels} x {frames_bytes} bytes), page tables ({options.accels} x {layout.total_bytes}) and "
            f"dram ({dram_bytes}) need {wanted} bytes and this machine allows {limit}: give less --hbm, --dram, "
            f"--max-contexts or --window"
        )


def settings_of(options: Options) -> dict[str, int | str]:
    """What boot and --sysctl set, checked.  Error: BootError."""
    settings: dict[str, int | str] = dict(DEFAULTS)
    for assignment in (*options.sysctl, *([f"tier.write={options.tier_write}"] if options.tier_write else ())):
        name, separator, value = assignment.partition("=")
        if not separator:
            raise BootError(f"--sysctl {assignment!r}: write NAME=VALUE")
        try:
            Sysctl().set(name, value)
        except Errno as error:
            raise BootError(f"--sysctl {assignment}: {error.detail['message']}") from error
        settings[name] = value
    return settings


def shape_of(options: Options) -> Shape:
    """Error: BootError."""
    if options.model == "sim":
        return Shape("sim", "", "sim", KvShape(1, 1, 2, 2), options.window_tokens or 4096, SIM_VOCAB, "none")
    path = resolve_model(options.model)
    try:
        config: ModelConfig = load_config(path)
    except ModelError as error:
        raise BootError(str(error)) from error
    window = min(options.window_tokens or config.window, config.window)
    kv = config.kv_shape(cast(KvDtype, options.kv_dtype))
    rope = f"theta={config.rope_theta!r} scaling={config.rope_scaling!r} sliding={config.sliding_window!r}"
    return Shape(Path(path).name, path, config.arch, kv, window, config.vocab, rope, config)


def driver_specs(
    options: Options, shape: Shape, layout: RowLayout, capacity_frames: int, device: Device
) -> list[DriverSpec]:
    common: dict[str, Any] = {"slots": layout.slots, "entries": layout.entries, "block_tokens": options.block_tokens}
    if shape.path:
        module = "attnix.drivers.accel"
        threads = options.threads or max(1, (os.cpu_count() or 1) // options.accels)
        config = common | {
            "model": shape.path,
            "dtype": options.dtype,
            "kv_dtype": options.kv_dtype,
            "numerics": options.numerics,
            "threads": threads,
            "cache_dir": str(home_dir() / "digests"),
        }
        if device != "cpu":
            config |= {"device": device, "frames": capacity_frames}
    else:
        module = "attnix.drivers.sim"
        config = common | {"vocab": SIM_VOCAB, "numerics": options.numerics} | _sim_settings(options.sim)
    return [
        DriverSpec(
            device=d,
            name=f"hbm{d}",
            argv=driver_argv(module),
            config=config | ({"ordinal": d} if device == "cuda" else {}),
            # Frames in a device's own memory leave the arena a stub that nobody reads.
            arena_bytes=capacity_frames * shape.kv.frame_bytes(options.block_tokens) if device == "cpu" else STUB_BYTES,
            rows_bytes=layout.total_bytes,
            arena="kept" if device == "cpu" else "lost",
            device_bytes=0 if device == "cpu" else capacity_frames * shape.kv.frame_bytes(options.block_tokens),
        )
        for d in range(options.accels)
    ]


def _sim_settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text or "{}")
    except ValueError as error:
        raise BootError(f"--sim is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise BootError(f"--sim is a JSON object, not {text}")
    return settings


def identity_of(options: Options, shape: Shape, probes: Sequence[Probe]) -> tuple[tuple[str, str], ...]:
    """Everything that decides what KV a token gets.  Error: BootError when the accels do not agree about the model."""
    first = probes[0]
    if any((p.fingerprint, p.engine) != (first.fingerprint, first.engine) for p in probes):
        raise BootError("the accel drivers do not hold the same model on the same engine")
    return (
        ("format", KEY_FORMAT),
        ("weights", first.fingerprint),
        ("kv_dtype", options.kv_dtype),
        ("dtype", options.dtype),
        ("geometry", "x".join(map(str, shape.kv))),
        ("rope", shape.rope),
        ("block_tokens", str(options.block_tokens)),
        ("adapter", ""),
        ("engine", first.engine),
        ("numerics", options.numerics),
    )


def kernel_config(
    options: Options,
    settings: dict[str, int | str],
    shape: Shape,
    devices: Sequence[DeviceConfig],
    identity: tuple[tuple[str, str], ...],
    fingerprint: str,
    text: TextService | None,
    limits: tuple[GroupLimit, ...] = (),
) -> KernelConfig:
    """The kernel's half of boot."""
    return KernelConfig(
        devices=tuple(devices),
        kv=shape.kv,
        window_tokens=shape.window_tokens,
        vocab_tokens=shape.vocab_tokens,
        identity=identity,
        block_tokens=options.block_tokens,
        max_contexts=options.max_contexts,
        stop_tokens=tuple(text.stop_ids)[:6] if text else (),
        owner_uid=os.geteuid(),
        version=__version__,
        model=shape.name,
        fingerprint=fingerprint,
        architecture=shape.architecture,
        kv_dtype=options.kv_dtype,
        numerics=options.numerics,
        tokenizer=text.tokenizer_path if text else "",
        daemon_pid=os.getpid(),
        sharing=options.sharing,
        sysctl=settings,
        limits=limits,
    )


def make_kernel(options: Options, config: KernelConfig, core: CoreApi) -> Kernel:
    """Error: BootError, of limits that cannot be."""
    try:
        return Kernel(config, core)
    except Errno as error:
        raise BootError(f"--groups {options.groups}: {error.detail['message']}") from error


class _Relay:
    """Events of drivers that start before there is a daemon to take them."""

    def __init__(self) -> None:
        self._early: list[Event] = []
        self._feed: Callable[[Event], None] | None = None

    def emit(self, event: Event) -> None:
        if self._feed is None:
            self._early.append(event)
        else:
            self._feed(event)

    def log(self, level: str, text: str) -> None:
        print(f"attnix: {level}: {text}", file=sys.stderr, flush=True)
        self.emit(Bug(level, text))

    def connect(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        early, self._early = self._early, []
        for event in early:
            feed(event)


def record(kernel: Kernel, path: str, config: KernelConfig, secret: bytes) -> Recorder:
    """Error: BootError."""
    policies = tuple(name for name in registry.names() if name not in registry.BUILT_IN)
    try:
        return Recorder(kernel, Path(path), Header(config, secret, policies))
    except FileExistsError as error:
        raise BootError(f"--record {path}: it is there already and is not written over; choose another name") from error
    except OSError as error:
        raise BootError(f"--record {path}: {error.strerror}") from error


async def serve(options: Options, ready: Callable[[str], None]) -> int:
    """Boot and serve until shutdown.  Returns the exit status.

    Error: BootError, with no socket and no process left behind; also when SIGTERM or SIGINT comes before it serves.
    """
    loop = asyncio.get_running_loop()
    this = asyncio.current_task()
    assert this is not None
    for signum in _STOPPED:
        loop.add_signal_handler(signum, this.cancel, signum.name)  # until the daemon has its own
    try:
        listener = systemd.inherited(options.socket_group) or Listener(options.socket, options.socket_group)
    except CannotListen as error:
        raise BootError(str(error)) from error
    relay = _Relay()
    text: TextService | None = None
    supervisor: Supervisor | None = None
    durable: Durable | None = None
    recorder: Recorder | None = None
    try:
        for problem in register_policies():
            relay.log("warning", problem)
        settings = settings_of(options)
        secret = read_secret(Path(options.state_dir))
        shape = shape_of(options)
        frame_bytes = shape.kv.frame_bytes(options.block_tokens)
        device, found = choose(options.device if shape.path else "cpu", options.accels)
        size_bytes = hbm_bytes(options.hbm, device, found, shape.config, options.dtype)
        capacity = size_bytes // frame_bytes
        if capacity < 2:
            raise BootError(f"--hbm {size_bytes} bytes holds {capacity} frames of {frame_bytes}: give it more")
        layout = RowLayout(options.max_contexts, -(-shape.window_tokens // options.block_tokens))
        tiers = TierDrivers(Path(options.state_dir), frame_bytes, shape.kv.layers, options.block_tokens)
        dram: DramSpec | None = None
        if options.dram_bytes or options.tiers:
            dram = tiers.dram(options.accels, options.dram_bytes, stages=bool(options.tiers))
        limits = read_limits(options.groups, frame_bytes) if options.groups else ()
        check_memory(options, 0 if device == "cuda" else capacity * frame_bytes, layout, dram)
        specs = driver_specs(options, shape, layout, capacity, device)
        supervisor = Supervisor(specs, relay.emit, relay.log, dram=dram, tier_of=tiers.attached)
        starting = asyncio.ensure_future(supervisor.start())
        await asyncio.sleep(0)  # let the drivers begin to load while the text worker does
        if shape.path:
            text = TextService(shape.path, log=relay.log)
        probes = await starting
        identity = identity_of(options, shape, probes)
        tiers.identity = identity_digest(identity)
        supervisor.set_identity(tiers.identity)
        devices = [DeviceConfig(f"hbm{d}", "hbm", capacity) for d in range(options.accels)]
        if dram is not None:
            devices.append(DeviceConfig(dram.name, "dram", dram.capacity_frames))
        for name, request in zip(name_tiers(options.tiers), options.tiers, strict=True):
            probe = await supervisor.start_tier(tiers.spec(len(devices), name, request))
            devices.append(DeviceConfig(name, request.kind, probe.capacity_frames))
        rows = [memoryview(supervisor.rows(d)) for d in range(options.accels)]
        config = kernel_config(options, settings, shape, devices, identity, probes[0].fingerprint, text, limits)
        core = Core(secret, options.block_tokens, layout, [d.capacity_frames for d in devices], rows)
        kernel = make_kernel(options, config, core)
        if options.record:
            recorder = record(kernel, options.record, config, secret)
        durable = open_durable(Path(options.state_dir), config, relay.log)
        daemon = Daemon(
            recorder or kernel, listener, text, supervisor, journal=durable.journal, snapshots=durable.snapshots
        )
        durable.connect(daemon.feed)
        relay.connect(daemon.feed)
        if text is not None:
            await text.start()
    except BaseException as error:
        listener.close()
        if text is not None:
            await text.close()
        if supervisor is not None:
            await supervisor.close()
        if durable is not None:
            durable.close()
        if recorder is not None:
            recorder.close()
        if isinstance(error, asyncio.CancelledError):
            raise BootError(f"stopped by {error}") from error
        if isinstance(error, (DriverStartError, TextUnavailable, BootError, ValueError, OSError, MemoryError)):
            raise BootError(str(error)) from error
        raise

    def serving() -> None:
        ready(listener.path)
        systemd.notify("READY=1")

    try:
        return await daemon.run(serving)
    finally:
        systemd.notify("STOPPING=1")
        if recorder is not None:
            recorder.close()


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of boot_tiers.py for argparse, which shows the message of its own exception only."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def parse(argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="attnix boot",
        usage="%(prog)s [OPTIONS]",  # all of them are a screen, in front of the line that says what was wrong
        description="Start the attnix daemon.",
    )
    parser.add_argument(
        "--model", default="smollm2", help="path of a GGUF file or Hugging Face directory, a pulled model, or sim"
    )
    parser.add_argument("--socket", default=default_socket_path(), help="Unix socket to serve (default: %(default)s)")
    parser.add_argument(
        "--socket-group", default="", metavar="GROUP", help="its members may connect too (default: nobody else)"
    )
    parser.add_argument(
        "--hbm",
        default=HbmSize(),
        type=_argument(parse_hbm),
        metavar="SIZE",
        help="memory for frames, per accel (default: 256MiB; on cuda 90%% of what the weights leave)",
    )
    parser.add_argument(
        "--device", default=os.environ.get(DEVICE_VARIABLE, "auto"), choices=DEVICES,
        help="what computes; auto: cuda where this machine has it, else cpu; cuda-dry: for tests (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dram", default=None, type=_argument(parse_bytes), metavar="SIZE",
        help="second tier: an arena in shared memory (default: none, or twice --hbm when a slower tier stages through it)",
    )  # fmt: skip
    parser.add_argument(
        "--nvme", action="append", default=[], type=_argument(parse_nvme), metavar="SIZE[@PATH]",
        help="a file tier (default path: in the state directory)",
    )  # fmt: skip
    parser.add_argument(
        "--remote", action="append", default=[], type=_argument(parse_remote), metavar="URL[,SIZE]",
        help="a Redis or Valkey server as a tier: redis://host:6379 or redis+unix:///path",
    )  # fmt: skip
    parser.add_argument(
        "--sim-tier", action="append", default=[], type=_argument(parse_sim_tier), metavar="SIZE[,JSON]",
        help="a simulated tier, with settings of its own",
    )  # fmt: skip
    parser.add_argument(
        "--tier-write", default="", choices=("", "back", "through", "selective"), help="when blocks are copied down"
    )
    parser.add_argument(
        "--accels", default=1, type=int, help="compute devices, each a driver process (default: %(default)s)"
    )
    parser.add_argument(
        "--block-tokens", default=BLOCK_TOKENS, type=int, help="tokens per block (default: %(default)s)"
    )
    parser.add_argument("--window", default=0, type=int, help="longest context in tokens (default: the model's)")
    parser.add_argument("--max-contexts", default=MAX_CONTEXTS, type=int, help="context slots (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of the weights")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=("float32", "bfloat16", "int8"), help="of the frames")
    parser.add_argument(
        "--numerics", default="fast", choices=("fast", "invariant"), help="invariant: batch-invariant results"
    )
    parser.add_argument("--threads", default=0, type=int, help="of each accel (default: the cores shared out)")
    parser.add_argument("--sharing", default="uid", choices=("uid", "none"), help="who shares prefixes")
    parser.add_argument(
        "--state-dir", default=str(state_dir()), help="secret, journal, snapshots (default: %(default)s)"
    )
    parser.add_argument("--sim", default="", help="settings of the simulated accel, as JSON (with --model sim)")
    parser.add_argument("--sysctl", action="append", default=[], metavar="NAME=VALUE", help="set a tunable at boot")
    parser.add_argument("--groups", default="", metavar="FILE", help="limits of groups, as TOML (docs/groups.md)")
    parser.add_argument(
        "--record",
        default="",
        metavar="FILE",
        help="write every event down, for `attnix replay FILE`: holds all tokens and the secret",
    )
    a = parser.parse_args(argv)
    for name, least in (("accels", 1), ("block_tokens", 1), ("window", 0), ("max_contexts", 1), ("threads", 0)):
        if getattr(a, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if a.accels > 8 or a.block_tokens > 256:
        parser.error("at most 8 accels and 256 tokens per block")
    tiers = (*a.nvme, *a.sim_tier, *a.remote)
    dram = a.dram
    if dram is None:
        dram = default_dram_bytes(a.accels * (a.hbm.n_bytes or DEFAULT_BYTES), tiers, machine_bytes())
    if a.accels + bool(dram or tiers) + len(tiers) > MAX_DEVICES:
        parser.error(f"at most {MAX_DEVICES} accels and tiers together")
    return Options(
        a.model, a.socket, a.hbm, a.accels, a.block_tokens, a.window, a.max_contexts, a.dtype, a.kv_dtype, a.numerics,
        a.threads, a.sharing, a.state_dir, a.sim, tuple(a.sysctl), dram, tiers, a.tier_write,
        a.record, a.socket_group, a.device, a.groups,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after an orderly shutdown, 1 when it cannot start, 70 after a panic."""
    options = parse(argv)

    def ready(path: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # whoever started it does not want to know
            print(f"attnix: ready on {path}", flush=True)

    try:
        return uvloop.run(serve(options, ready))
    except BootError as error:
        print(f"attnix: cannot boot: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
