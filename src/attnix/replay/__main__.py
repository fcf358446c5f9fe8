"""`attnix replay`: a recorded trace through the kernel under a simulated clock.

    attnix replay ../shared/traces/mooncake_conversation.jsonl.gz --capacity 5% --policy lru,learned --rate 0.3
    attnix replay --record run.log --model sim      boots a daemon that writes its events down
    attnix replay run.log                           decides them all again, and says where the first difference is

What a profile's numbers come from: src/attnix/replay/profile.py; what is simulated how: docs/replay.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from attnix.kernel.errors import Errno
from attnix.kernel.tag import stored_bytes
from attnix.plugins import register_policies
from attnix.recording import BadRecording, is_recording
from attnix.traces import load

from . import again, waits
from .engine import Frames, Replay, policy_names, share_of
from .metrics import Result
from .profile import PROFILES, Profile
from .report import document, plot, table
from .workload import from_trace

_OF_RECORDINGS = ("--check",)
_OF_BOTH = ("--json",)
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def size_bytes(text: str) -> int:
    """`48GiB`, `256G`, `1000`.  ValueError."""
    lowered = text.strip().lower().removesuffix("b")
    digits = lowered.rstrip("kmgti")
    try:
        size = round(float(digits) * _UNITS[lowered[len(digits) :]])
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a size such as 48GiB") from None
    if size < 0:
        raise ValueError(f"{text!r} is negative")
    return size


def frames_in(profile: Profile, block_tokens: int, hbm: str, dram: str, nvme: str) -> Frames:
    """Sizes in bytes as frames; without a size of hbm, the profile's.  Slower tiers hold stored frames.  ValueError."""
    frame_bytes = profile.kv.frame_bytes(block_tokens)
    lower = not hbm
    frames = Frames(
        (size_bytes(hbm) if hbm else profile.hbm_bytes) // frame_bytes,
        (size_bytes(dram) if dram else profile.dram_bytes * lower) // stored_bytes(frame_bytes),
        (size_bytes(nvme) if nvme else profile.nvme_bytes * lower) // stored_bytes(frame_bytes),
    )
    if frames.hbm < 1:
        raise ValueError(f"hbm has no room for one frame of {frame_bytes:,} bytes")
    return frames


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 not possible, 2 wrong usage."""
    for complaint in register_policies():
        print(f"attnix replay: {complaint}", file=sys.stderr)
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--record" in argv:
        if "--daemon" in argv or "-d" in argv:
            print(
                "attnix replay: --record stays in the foreground; `attnix boot --daemon --record FILE` does not",
                file=sys.stderr,
            )
            return 2
        os.execv(sys.executable, [sys.executable, "-m", "attnix.boot", *argv])
    parser = argparse.ArgumentParser(
        prog="attnix replay",
        allow_abbrev=False,
        description="Replay a recorded trace through the kernel under a simulated clock, or a recorded run as it was.",
        epilog="attnix replay --record FILE [what boot takes]: a live run, written down, in the foreground; in the "
        "background: attnix boot --daemon --record FILE.",
    )
    parser.add_argument(
        "trace", type=Path, help=".jsonl or .csv, .gz or not: see docs/replay.md; or what `attnix boot --record` wrote"
    )
    parser.add_argument("--check", action="store_true", help="of a recorded run: every invariant after every step")
    parser.add_argument("--policy", default="lru", help=f"eviction policies, a,b,...: {', '.join(policy_names())}")
    parser.add_argument("--profile", default="h100-8b", choices=sorted(PROFILES), help="machine and model")
    parser.add_argument(
        "--capacity", default="",
        help="hbm as a share of the distinct blocks (5%%) or in frames; with dram: 5%%+20%%; with --waits several: 2%%,5%%",
    )  # fmt: skip
    parser.add_argument("--hbm", default="", help="bytes of KV, such as 48GiB; then the other tiers are 0 unless given")
    parser.add_argument("--dram", default="", help="bytes; 0: none")
    parser.add_argument("--nvme", default="", help="bytes; 0: none")
    parser.add_argument("--hints", action="store_true", help="tell the kernel when a tool will answer")
    parser.add_argument(
        "--waits", nargs="?", const=",".join(waits.VARIANTS), default="", metavar="a,b",
        help=f"sessions wait for their tools in the kernel; compare {', '.join(waits.VARIANTS)}",
    )  # fmt: skip
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals this many times as fast as recorded")
    parser.add_argument(
        "--concurrency", type=float, default=16.0, help="sessions at once, on average, in traces of sessions"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order and the starts of sessions")
    parser.add_argument("--requests", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--orders", type=int, default=1, help="with --waits: orders of arrival, from --seed on")
    parser.add_argument("--sessions", type=int, default=0, help="only the first so many sessions, whole; 0: all")
    parser.add_argument(
        "--sysctl", action="append", default=[], metavar="NAME=VALUE", help="set at boot, such as sched.policy=deadline"
    )
    parser.add_argument("--exact", action="store_true", help="decode one token per pass (slow): see docs/replay.md")
    parser.add_argument("--json", default="", metavar="FILE", help="write a document; -: to standard output, no table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw hits and TTFT (needs attnix[plot])")
    args = parser.parse_args(argv)
    given = [word.partition("=")[0] for word in argv if word.startswith("--")]
    if args.rate <= 0 or args.concurrency <= 0 or args.requests < 0:
        parser.error("--rate and --concurrency are more than 0, --requests at least 0")
    if args.capacity and (args.hbm or args.dram or args.nvme):
        parser.error("--capacity says all sizes, so it excludes --hbm, --dram and --nvme")
    policies = args.policy.split(",")
    unknown = [name for name in policies if name not in policy_names()]
    if unknown:
        parser.error(f"no eviction policy {unknown[0]!r}; known: {', '.join(policy_names())}")
    unknown = [name for name in args.waits.split(",") if args.waits and name not in waits.VARIANTS]
    if unknown:
        parser.error(f"--waits: no {unknown[0]!r}; known: {', '.join(waits.VARIANTS)}")
    if args.waits and (not args.capacity or len(policies) != 1):
        parser.error("--waits wants a --capacity and one --policy")
    if args.orders != 1 and not args.waits:
        parser.error("--orders is for --waits")
    try:
        recorded = is_recording(args.trace)
        wrong = [name for name in given if (name in _OF_RECORDINGS) != recorded and name not in _OF_BOTH]
        if wrong:
            what, others = ("recorded run", "traces") if recorded else ("trace", "recorded runs")
            parser.error(f"{args.trace} is a {what}: {', '.join(wrong)} is for {others}")
        if recorded:
            return _again(args)
        return _waits(args, policies[0]) if args.waits else _run(args, policies)
    except OSError as error:
        print(f"attnix: {error.filename or args.trace}: {error.strerror or error}", file=sys.stderr)
        return 1
    except (BadRecording, Errno, ImportError, ValueError, RuntimeError) as error:
        print(f"attnix: {error}", file=sys.stderr)
        return 1


def _setting(text: str) -> tuple[str, int | str]:
    """`sched.step_tokens=2048`.  ValueError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--sysctl {text!r} is not NAME=VALUE")
    return name, int(value) if value.isdecimal() else value


def _again(args: argparse.Namespace) -> int:
    """A recorded run."""
    began = perf_counter()
    outcome = again.replay(args.trace, check=args.check)
    _write(args, outcome.as_json(), again.told(args.trace, outcome, perf_counter() - began))
    return 0 if outcome.differs_at < 0 and not outcome.cut_short else 1


def _write(args: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """As --json asks: the document, the text or both."""
    written = json.dumps(document, indent=2) + "\n"
    if args.json == "-":
        sys.stdout.write(written)
        return
    if args.json:
        Path(args.json).write_text(written)
    print(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _waits(args: argparse.Namespace, policy: str) -> int:
    profile = PROFILES[args.profile]
    seeds = range(args.seed, args.seed + args.orders)
    traces = [load(args.trace, concurrency=args.concurrency, seed=seed) for seed in seeds]
    many = [from_trace(t, rate=args.rate, limit=args.requests, limit_sessions=args.sessions) for t in traces]
    sysctl = dict(map(_setting, args.sysctl))
    rows = waits.compare(many, profile, args.capacity.split(","), args.waits.split(","), policy, sysctl, _say)
    first = many[0]
    settings: dict[str, Any] = {
        "trace": first.name, "profile": profile.name, "block_tokens": first.block_tokens,
        "distinct_blocks": first.distinct_blocks, "sessions": len(first.sessions), "turns": first.turns, "policy": policy,
        "rate": args.rate, "concurrency": args.concurrency, "seed": args.seed, "seeds": args.orders, "sysctl": args.sysctl,
    }  # fmt: skip
    _write(args, waits.document(settings, rows), waits.table(settings, rows))
    return 0


def _run(args: argparse.Namespace, policies: list[str]) -> int:
    profile = PROFILES[args.profile]
    trace = load(args.trace, concurrency=args.concurrency, seed=args.seed)
    workload = from_trace(trace, rate=args.rate, limit=args.requests, limit_sessions=args.sessions)
    if args.capacity:
        frames = share_of(workload, args.capacity)
    else:
        frames = frames_in(profile, workload.block_tokens, args.hbm, args.dram, args.nvme)
    results: list[Result] = []
    for policy in policies:
        began = perf_counter()
        sysctl = dict(_setting(text) for text in args.sysctl)
        replay = Replay(workload, profile, frames, policy, hints=args.hints, exact=args.exact, sysctl=sysctl)
        results.append(replay.run())
        print(f"{policy}: {perf_counter() - began:.1f} s", file=sys.stderr)
    settings: dict[str, Any] = {
        "trace": workload.name, "profile": profile.name, "frames": frames.by_tier(), "block_tokens": workload.block_tokens,
        "distinct_blocks": workload.distinct_blocks, "has_sessions": workload.has_sessions, "hints": args.hints,
        "rate": args.rate, "concurrency": args.concurrency, "seed": args.seed, "exact": args.exact,
        "sysctl": args.sysctl,
    }  # fmt: skip
    _write(args, document(settings, results), table(settings, results))
    if args.plot:
        plot(args.plot, settings, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
