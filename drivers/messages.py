"""The messages of drivers/protocol.py as typed records, checked: what arrives is believed only after it went through here.

`x_message` builds what is sent, `decode_x` checks what was received and raises BadMessage when it is not what the
protocol says.  Both ends use this file, so a shape is written down once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attnix.kernel.batch import FORWARD, SAMPLE, SCORE, SEQ_BYTES
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Found, Transfer, TransferDone
from attnix.kernel.params import MAX_DEVICES
from attnix.kernel.tag import GATES, tag_bytes

from .channel import BadMessage
from .protocol import ExecStats, Probe, TimedPrefill


def probe_message(request: int, probe: Probe) -> list[Any]:
    timed = [list(one) for one in probe.prefill]
    return ["probe", request, {**probe._asdict(), "capabilities": list(probe.capabilities), "prefill": timed}]


def decode_probe(message: list[Any]) -> tuple[int, Probe]:
    """The request number and the fields of a probe answer.  Fields that we do not know are ignored: newer drivers may
    say more."""
    _expect(len(message) == 3 and _is_int(message[1]) and isinstance(message[2], dict), "probe", message)
    fields: dict[str, Any] = message[2]
    values: list[Any] = []
    for name in Probe._fields:
        value = fields.get(name, Probe._field_defaults.get(name))
        if name == "capabilities":
            _expect(
                isinstance(value, list) and all(isinstance(verb, str) for verb in value),
                "probe field capabilities",
                value,
            )
            value = tuple(value or ())
        elif name == "prefill":
            value = decode_prefill(value)
        elif name in _PROBE_NUMBERS:
            _expect(isinstance(value, int) and _is_int(value) and value >= 0, f"probe field {name}", value)
        else:
            _expect(isinstance(value, str), f"probe field {name}", value)
        values.append(value)
    return message[1], Probe(*values)


def decode_prefill(value: object) -> tuple[TimedPrefill, ...]:
    """Timed passes as they travel.  Error: BadMessage for anything that no pass can have been."""
    _expect(isinstance(value, list | tuple) and len(value) <= MAX_TIMED, "probe field prefill", value)
    assert isinstance(value, list | tuple)
    for one in value:
        _expect(isinstance(one, list) and len(one) == 3 and all(map(_is_int, one)), "probe field prefill", one)
        _expect(one[0] > 0 and one[1] >= 0 and one[2] > 0 and max(one) <= _MAX_INT, "probe field prefill", one)
    return tuple(TimedPrefill(*one) for one in value)


MAX_TIMED = 64  # passes in a probe: more would only forget the first ones
_MAX_INT = 1 << 62

_PROBE_NUMBERS = frozenset(
    {
        "protocol", "pid", "capacity_frames", "frame_bytes", "alignment_bytes", "vocab_tokens",
        "stored_bytes", "read_bytes_s", "write_bytes_s", "latency_ns",
    }
)  # fmt: skip


def identity_message(digest: bytes) -> list[Any]:
    return ["identity", digest]


def decode_identity(message: list[Any]) -> bytes:
    _expect(len(message) == 2 and isinstance(message[1], bytes) and len(message[1]) == 16, "identity", message)
    return bytes(message[1])


def exec_message(effect: Exec) -> list[Any]:
    message = ["exec", effect.seq, effect.seqs, effect.tokens, effect.copies, list(effect.histories), effect.gates]
    return [*message, list(effect.allowed)] if effect.allowed else message


def decode_exec(message: list[Any]) -> Exec:
    """A received `exec`; the device number is the daemon's business and 0 here.  Gates and masks may be left out."""
    _expect(len(message) in (6, 7, 8) and _is_int(message[1]), "exec", message)
    _, seq, seqs, tokens, copies, histories, *rest = message
    gates = rest[0] if rest else b""
    _expect(all(isinstance(part, bytes) for part in (seqs, tokens, copies, gates)), "exec", message)
    _expect(_is_list_of_bytes(histories), "exec histories", histories)
    _expect(len(gates) % 16 == 0, "exec gates", gates)
    _expect(all(0 <= gate < GATES for gate in memoryview(gates).cast("q")[::2].tolist()), "exec gates", gates)
    allowed = rest[1] if len(rest) > 1 else []
    _expect(_is_list_of_bytes(allowed), "exec masks", allowed)
    return Exec(0, seq, seqs, tokens, copies, tuple(histories), gates, tuple(allowed))


def done_message(done: ExecDone, stats: ExecStats) -> list[Any]:
    return [
        "done", done.seq, done.tokens, done.logprobs, [list(top) for top in done.tops], list(done.scores), list(stats)
    ]  # fmt: skip


def failed_message(failed: ExecFailed) -> list[Any]:
    return ["failed", failed.seq, int(failed.code), failed.reason]


class Expected(NamedTuple):
    """How many results a pass must bring, read from its `seqs`: a driver that returns another number is lying."""

    sequences: int
    samples: int
    tops: int
    scores: int


def expected_results(seqs: bytes) -> Expected:
    """Count what a whole `seqs` array asks for."""
    words = memoryview(seqs).cast("I")
    flags = words[_FLAGS_WORD :: SEQ_BYTES // 4].tolist()
    logprobs = words[_LOGPROBS_WORD :: SEQ_BYTES // 4].tolist()
    samples = tops = scores = 0
    for flag, wanted in zip(flags, logprobs, strict=True):
        samples += (flag & SAMPLE) != 0
        tops += (flag & FORWARD) != 0 or (wanted > 0 and (flag & SAMPLE) != 0)
        scores += (flag & SCORE) != 0
    return Expected(len(flags), samples, tops, scores)


_FLAGS_WORD = 7  # 4-byte words from the start of a Seq record (kernel/batch.py)
_LOGPROBS_WORD = 17


def decode_done(message: list[Any], device: int, expected: Expected) -> tuple[ExecDone, ExecStats]:
    """A received `done`, checked against what its pass asked for."""
    _expect(len(message) == 7 and _is_int(message[1]), "done", message)
    _, seq, tokens, logprobs, tops, scores, stats = message
    _expect(isinstance(tokens, bytes) and len(tokens) == 4 * expected.samples, "done tokens", tokens)
    _expect(isinstance(logprobs, bytes) and len(logprobs) == 4 * expected.samples, "done logprobs", logprobs)
    _expect(isinstance(tops, list) and len(tops) == expected.tops, "done tops", tops)
    pairs: list[tuple[bytes, bytes]] = []
    for top in tops:
        _expect(_is_list_of_bytes(top) and len(top) == 2 and len(top[0]) == len(top[1]), "done top", top)
        pairs.append((top[0], top[1]))
    _expect(_is_list_of_bytes(scores) and len(scores) == expected.scores, "done scores", scores)
    _expect(
        isinstance(stats, list) and len(stats) in (4, 5) and all(_is_int(n) and n >= 0 for n in stats),
        "done stats",
        stats,
    )
    counted = ExecStats(*stats)
    done = ExecDone(
        device, seq, tokens, logprobs, tuple(pairs), tuple(scores),
        counted.computed_tokens, counted.compute_ns, counted.waited_ns,
    )  # fmt: skip
    return done, counted


def decode_failed(message: list[Any], device: int) -> ExecFailed:
    _expect(
        len(message) == 4 and _is_int(message[1]) and _is_int(message[2]) and isinstance(message[3], str),
        "failed",
        message,
    )
    return ExecFailed(device, message[1], message[2], message[3])


def transfer_message(effect: Transfer) -> list[Any]:
    return [
        effect.verb, effect.seq, effect.arena, effect.pairs, effect.tags, effect.gate, effect.ticket
    ]  # fmt: skip


def decode_transfer(message: list[Any]) -> Transfer:
    """A received `read` or `write`; the device number is the daemon's business and 0 here.

    Frames are checked to be no less than 0; what lies beyond an arena or a tier only the driver can tell.
    """
    verb = message[0]
    _expect(verb in ("read", "write") and len(message) == 7, "transfer", message)
    _, seq, arena, pairs, tags, gate, ticket = message
    _expect(all(_is_int(number) for number in (seq, arena, gate, ticket)), verb, message)
    _expect(0 <= arena < MAX_DEVICES and -1 <= gate < GATES and ticket >= 0, verb, message)
    _expect(isinstance(pairs, bytes) and isinstance(tags, bytes), verb, message)
    items = len(pairs) // 8
    _expect(items > 0 and len(pairs) == 8 * items, f"{verb} pairs", pairs)
    _expect(min(memoryview(pairs).cast("i")) >= 0, f"{verb} pairs", pairs)
    _expect(len(tags) > 0 and len(tags) % items == 0, f"{verb} tags", tags)
    return Transfer(0, seq, verb, arena, pairs, tags, gate, ticket)


def moved_message(done: TransferDone) -> list[Any]:
    failed = [[item, int(code)] for item, code in done.failed]
    return ["moved", done.seq, failed, done.moved_bytes, done.elapsed_ns]


def decode_moved(message: list[Any], device: int, items: int) -> TransferDone:
    """A received `moved`, checked against the number of items that its transfer had."""
    _expect(len(message) == 5 and all(_is_int(message[at]) for at in (1, 3, 4)), "moved", message)
    _, seq, failed, moved_bytes, elapsed_ns = message
    _expect(moved_bytes >= 0 and elapsed_ns >= 0, "moved", message)
    _expect(isinstance(failed, list) and len(failed) <= items, "moved failures", failed)
    pairs: list[tuple[int, int]] = []
    for pair in failed:
        _expect(isinstance(pair, list) and len(pair) == 2 and _is_int(pair[0]) and _is_int(pair[1]), "moved", pair)
        _expect(0 <= pair[0] < items and pair[1] > 0, "moved failure", pair)
        pairs.append((pair[0], pair[1]))
    _expect(len({item for item, _ in pairs}) == len(pairs), "moved failures", failed)
    return TransferDone(device, seq, tuple(pairs), moved_bytes, elapsed_ns)


def found_message(rows: bytes) -> list[Any]:
    """rows: (int32 frame, packed tag) per slot.  Split a long inventory: a message holds at most 64 MiB."""
    return ["found", rows]


def decode_found(message: list[Any], device: int, epoch: int, block_tokens: int) -> Found:
    _expect(len(message) == 2 and isinstance(message[1], bytes), "found", message)
    rows: bytes = message[1]
    row_bytes = 4 + tag_bytes(block_tokens)
    _expect(len(rows) % row_bytes == 0, "found rows", rows)
    return Found(device, epoch, rows)


def found_frames(found: Found, block_tokens: int) -> list[int]:
    """The frames that an inventory names, in its order."""
    return memoryview(found.rows).cast("i")[:: 1 + tag_bytes(block_tokens) // 4].tolist() if found.rows else []


def answered_seq(message: list[Any]) -> int:
    """The pass or transfer that `done`, `failed` or `moved` answers, before anything else of it is looked at."""
    _expect(len(message) > 1 and _is_int(message[1]), message[0], message)
    return int(message[1])


def decode_health(message: list[Any]) -> tuple[int, dict[str, int]]:
    _expect(len(message) == 3 and _is_int(message[1]) and isinstance(message[2], dict), "health", message)
    for name, value in message[2].items():
        _expect(isinstance(name, str) and _is_int(value), "health counter", (name, value))
    return message[1], message[2]


def decode_log(message: list[Any]) -> tuple[str, str]:
    _expect(len(message) == 3 and isinstance(message[1], str) and isinstance(message[2], str), "log", message)
    return message[1], message[2]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of_bytes(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, bytes) for item in value)


def _expect(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise BadMessage(f"bad {what}: {str(got)[:200]}")
