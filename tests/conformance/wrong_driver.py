"""A driver process with one bug, chosen by its first argument: each is a mistake that a driver's author could make."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from attnix.drivers import messages
from attnix.drivers import serve as serve_module
from attnix.drivers.channel import Channel
from attnix.drivers.sim import SimBackend, SimDevice, main
from attnix.drivers.sim_model import Distribution, Trail
from attnix.kernel.batch import SAMPLE, SEQ, SEQ_BYTES, Seq, unpack_seqs
from attnix.kernel.events import Exec, ExecDone, ExecFailed

Outcome = ExecDone | ExecFailed
EXECUTE = SimDevice.execute
BUGS: dict[str, Callable[[], None]] = {}


def patch(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def bug(install: Callable[[], None]) -> Callable[[], None]:
    BUGS[install.__name__] = install
    return install


def rewrite_seqs(change: Callable[[SimDevice, Seq], Seq]) -> None:
    """Let the device see other sequences than it was given."""

    def execute(device: SimDevice, effect: Exec) -> Outcome:
        if len(effect.seqs) % SEQ_BYTES:
            return EXECUTE(device, effect)
        seqs = b"".join(SEQ.pack(*change(device, seq)) for seq in unpack_seqs(effect.seqs))
        return EXECUTE(device, effect._replace(seqs=seqs))

    patch(SimDevice, execute=execute)


def rewrite_done(change: Callable[[ExecDone], ExecDone]) -> None:
    """Let the daemon see another result than the device gave."""

    def execute(device: SimDevice, effect: Exec) -> Outcome:
        outcome = EXECUTE(device, effect)
        return change(outcome) if isinstance(outcome, ExecDone) else outcome

    patch(SimDevice, execute=execute)


@bug
def ignores_the_generation() -> None:
    def change(device: SimDevice, seq: Seq) -> Seq:
        return seq._replace(generation=device._generation[seq.slot]) if 0 <= seq.slot < 8 else seq

    rewrite_seqs(change)


@bug
def writes_below_write_from() -> None:
    rewrite_seqs(lambda device, seq: seq._replace(write_from=0))


@bug
def writes_nothing() -> None:
    rewrite_seqs(lambda device, seq: seq._replace(write_from=1 << 30))


@bug
def ignores_the_seed() -> None:
    rewrite_seqs(lambda device, seq: seq._replace(seed=1))


@bug
def penalises_the_prompt() -> None:
    rewrite_seqs(lambda device, seq: seq._replace(prompt_tokens=0))


@bug
def ignores_penalties() -> None:
    rewrite_seqs(lambda device, seq: seq._replace(presence_penalty=0.0))


@bug
def scores_from_the_start() -> None:
    rewrite_seqs(lambda device, seq: seq._replace(score_from=0))


@bug
def draws_when_asked_to_look() -> None:
    rewrite_seqs(lambda device, seq: seq._replace(flags=seq.flags | SAMPLE))


@bug
def copies_in_reverse() -> None:
    def execute(device: SimDevice, effect: Exec) -> Outcome:
        pairs = [effect.copies[at : at + 8] for at in range(0, len(effect.copies), 8)]
        return EXECUTE(device, effect._replace(copies=b"".join(reversed(pairs))))

    patch(SimDevice, execute=execute)


@bug
def copies_after_computing() -> None:
    def execute(device: SimDevice, effect: Exec) -> Outcome:
        outcome = EXECUTE(device, effect._replace(copies=b""))
        if isinstance(outcome, ExecDone):
            EXECUTE(device, effect._replace(seqs=b"", histories=()))
        return outcome

    patch(SimDevice, execute=execute)


@bug
def reads_frames_in_numeric_order() -> None:
    decode = SimDevice._decode_seq

    def sorted_prefix(device: SimDevice, *arguments: Any) -> Any:
        work = decode(device, *arguments)
        return work._replace(prefix=sorted(work.prefix))

    patch(SimDevice, _decode_seq=sorted_prefix)


@bug
def mixes_up_the_batch() -> None:
    rewrite_done(lambda done: done._replace(tokens=done.tokens[4:] + done.tokens[:4]))


@bug
def depends_on_the_batch_size() -> None:
    entry, execute = Trail.entry, SimDevice.execute
    sizes: list[int] = []

    def sized_execute(device: SimDevice, effect: Exec) -> Outcome:
        sizes[:] = [len(effect.seqs) // SEQ_BYTES]
        return execute(device, effect)

    patch(Trail, entry=lambda trail, token, home: entry(trail, token + sizes[0], home))
    patch(SimDevice, execute=sized_execute)


@bug
def numbers_positions_within_the_chunk() -> None:
    decode = SimDevice._decode_seq

    def from_zero(device: SimDevice, *arguments: Any) -> Any:
        work = decode(device, *arguments)
        return work._replace(homes=list(range(len(work.homes))))

    patch(SimDevice, _decode_seq=from_zero)


@bug
def remembers_instead_of_reading() -> None:
    answers: dict[bytes, ExecDone] = {}

    def execute(device: SimDevice, effect: Exec) -> Outcome:
        outcome = EXECUTE(device, effect)
        if isinstance(outcome, ExecFailed):
            return outcome
        return answers.setdefault(effect.seqs + effect.tokens, outcome)._replace(seq=effect.seq)

    patch(SimDevice, execute=execute)


@bug
def lists_alternatives_unsorted() -> None:
    rewrite_done(lambda done: done._replace(tops=tuple((a[4:] + a[:4], b[4:] + b[:4]) for a, b in done.tops)))


@bug
def scores_with_the_wrong_sign() -> None:
    logprob = Distribution.logprob
    patch(Distribution, logprob=lambda says, token: -logprob(says, token))


@bug
def counts_sequences_as_tokens() -> None:
    rewrite_done(lambda done: done._replace(computed_tokens=1))


@bug
def accepts_any_token() -> None:
    execute = SimDevice.execute

    def lenient(device: SimDevice, effect: Exec) -> Outcome:
        device.vocab, vocab = 1 << 31, device.vocab
        outcome = execute(device, effect)
        device.vocab = vocab
        return outcome

    patch(SimDevice, execute=lenient)


@bug
def crashes_on_a_bad_frame() -> None:
    def check(device: SimDevice, index: int) -> None:
        if not 0 <= index < device.capacity_frames:
            signal.raise_signal(signal.SIGKILL)

    patch(SimDevice, _check_frame=check)


@bug
def refuses_without_answering() -> None:
    failed = messages.failed_message
    patch(serve_module, failed_message=lambda refusal: ["log", "error", str(failed(refusal))])


@bug
def does_not_scrub() -> None:
    def drop(device: SimDevice, frames: Sequence[int]) -> None:
        pass

    patch(SimDevice, drop=drop)


@bug
def scrubs_too_much() -> None:
    drop = SimDevice.drop
    patch(SimDevice, drop=lambda device, frames: drop(device, [*frames, frames[-1] + 1]))


@bug
def is_silent_about_unknown_verbs() -> None:
    answers = serve_module.answers
    patch(serve_module, answers=lambda message, backend: [a for a in answers(message, backend) if a[0] != "unknown"])


@bug
def claims_more_frames_than_it_has() -> None:
    probe = SimBackend.probe

    def boast(backend: SimBackend) -> Any:
        honest = probe(backend)
        return honest._replace(capacity_frames=2 * honest.capacity_frames)

    patch(SimBackend, probe=boast)


@bug
def changes_its_fingerprint() -> None:
    probe = SimBackend.probe
    patch(SimBackend, probe=lambda backend: probe(backend)._replace(fingerprint=f"{time.monotonic_ns():032x}"))


@bug
def stays_when_the_channel_closes() -> None:
    recv = Channel.recv

    def recv_for_ever(channel: Channel) -> list[Any] | None:
        message = recv(channel)
        while message is None:
            signal.pause()
        return message

    patch(Channel, recv=recv_for_ever)


@bug
def exits_with_an_error_when_the_channel_closes() -> None:
    serve = serve_module.serve

    def angry(channel: Channel, backend: Any) -> None:
        serve(channel, backend)
        raise RuntimeError("end of file")

    patch(serve_module, serve=angry)


if __name__ == "__main__":
    BUGS[sys.argv[1]]()
    main(sys.argv[2:])
