"""The conformance suite: what every accel driver must do, as checks that run against a live driver process.

    from attnix.drivers.conformance import CHECKS, Rig, check_driver

    report = check_driver(lambda: Rig(spec, layout, block_tokens))     # everything, at once
    assert not report.findings

    @pytest.mark.parametrize("name", CHECKS)                           # or one test per check
    def test_conforms(name, rig): CHECKS[name](rig)

Each check raises Nonconformance.  They need a capacity of 40 frames, 8 rows of 4 entries, and a vocabulary of 64.
Numbers are compared bit for bit when the driver says `numerics = invariant`, else within TOLERANCE.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from attnix.kernel.batch import ALLOWED, FORWARD, HISTORY, SAMPLE, SCORE, SEQ_BYTES
from attnix.kernel.errors import E

from .conformance_process import Finding, Nonconformance, Report, require, run_checks
from .conformance_rig import Answer, PassSeq, Rig
from .messages import exec_message
from .protocol import PACKET_BYTES, PROTOCOL_VERSION

__all__ = [
    "CHECKS",
    "MIN_ENTRIES",
    "MIN_FRAMES",
    "MIN_SLOTS",
    "Check",
    "Finding",
    "Nonconformance",
    "Report",
    "Rig",
    "check_driver",
]

MIN_FRAMES: Final = 40
MIN_SLOTS: Final = 8
MIN_ENTRIES: Final = 4
TOLERANCE: Final = 0.05  # log-probabilities of a driver whose numerics are "fast"
ROUNDING: Final = 2e-5  # the same of one that is invariant, where two formulas for one number are compared

Check: TypeAlias = Callable[[Rig], None]
CHECKS: dict[str, Check] = {}


def check_driver(start: Callable[[], Rig]) -> Report:
    """Run every check (conformance_process.run_checks)."""
    return run_checks(CHECKS, start)


def _check(check: Check) -> Check:
    CHECKS[check.__name__] = check
    return check


# -- who it is ----------------------------------------------------------------------------------------------------


@_check
def probe_is_complete_and_stable(rig: Rig) -> None:
    """The fields make sense together, and asking twice gives the same answer."""
    probe = rig.probe
    require(probe.protocol == PROTOCOL_VERSION, f"protocol {probe.protocol}, expected {PROTOCOL_VERSION}")
    require(probe.pid == rig.process.pid, f"says pid {probe.pid}, is {rig.process.pid}")
    try:
        bytes.fromhex(probe.fingerprint)
    except ValueError:
        raise Nonconformance(f"fingerprint {probe.fingerprint!r} is not a hex digest") from None
    require(len(probe.fingerprint) >= 16, f"fingerprint {probe.fingerprint!r} is too short to identify weights")
    require({"exec", "drop"} <= set(probe.capabilities), f"capabilities {probe.capabilities} lack exec or drop")
    require(probe.frame_bytes > 0 and probe.alignment_bytes > 0, f"frames of {probe.frame_bytes} bytes")
    require(probe.frame_bytes % probe.alignment_bytes == 0, "frame_bytes is no multiple of alignment_bytes")
    fits = 0 < probe.capacity_frames * probe.frame_bytes <= len(rig.arena)
    require(fits, f"{probe.capacity_frames} frames of {probe.frame_bytes} bytes do not fit {len(rig.arena)} bytes")
    require(probe.capacity_frames >= MIN_FRAMES, f"the suite needs {MIN_FRAMES} frames, it has {probe.capacity_frames}")
    require(probe.vocab_tokens >= 64, f"a vocabulary of {probe.vocab_tokens}")
    require(probe.numerics in ("fast", "invariant"), f"numerics {probe.numerics!r}")
    require(
        probe.kind in ("accel", "sim") and bool(probe.engine) and bool(probe.model), "kind, engine or model is not said"
    )
    require(rig.ask_probe() == probe, "a second probe is answered differently")


@_check
def unknown_verbs_are_answered(rig: Rig) -> None:
    """["unknown", verb], for a verb it does not know with or without arguments."""
    for message in (["frobnicate"], ["frobnicate", 1, b"x", {"a": 1}]):
        rig.send(message)
        answers = rig.until_health()
        require([answer[:2] for answer in answers] == [["unknown", "frobnicate"]], f"answered {answers!r:.200}")


# -- passes -------------------------------------------------------------------------------------------------------


@_check
def each_pass_is_answered_once_and_in_order(rig: Rig) -> None:
    """Three passes sent at once are three answers in order."""
    prompt = _prompt(rig, 1, 5)
    rig.map_row(0, [1, 2, 3], 5)
    effects = [rig.effect([PassSeq(0, 0, prompt)]) for _ in range(3)]
    for effect in effects:
        rig.send(exec_message(effect))
    answers = [answer[:2] for answer in rig.until_health()]
    require(answers == [["done", effect.seq] for effect in effects], f"answered {answers}")


@_check
def the_same_pass_gives_the_same_bytes(rig: Rig) -> None:
    """A redo after a crash must not change history: same answer, same KV, in other frames too."""
    prompt = _prompt(rig, 2, 2 * rig.block_tokens + 1)
    rig.map_row(0, [4, 5, 6], len(prompt))
    first = rig.run([PassSeq(0, 0, prompt, logprobs=5)])
    frames = [rig.frame(index) for index in (4, 5)]
    require(all(set(frame) != {0x5A} for frame in frames), "a prefill left its frames as they were")
    require(rig.run([PassSeq(0, 0, prompt, logprobs=5)]) == first, "the same pass gave another answer")
    require([rig.frame(index) for index in (4, 5)] == frames, "the same pass wrote other KV")
    rig.map_row(1, [9, 7, 8], len(prompt))
    require(rig.run([PassSeq(1, 0, prompt, logprobs=5)]) == first, "the same pass in other frames answered differently")
    require([rig.frame(index) for index in (9, 7)] == frames, "the same pass wrote other KV in other frames")


@_check
def chunks_and_steps_agree_with_one_prefill(rig: Rig) -> None:
    """A prompt in one pass, in uneven chunks, and one token at a time: the same continuation."""
    prompt = _prompt(rig, 3, 2 * rig.block_tokens + 2)
    rig.map_row(0, [10, 11, 12], len(prompt))
    whole = answer = rig.run([PassSeq(0, 0, prompt, logprobs=5)])
    for slot, frames, size in ((1, [15, 13, 14], rig.block_tokens - 1), (2, [18, 17, 16], 1)):
        rig.spoil(frames)
        rig.map_row(slot, frames, len(prompt))
        for start in range(0, len(prompt), size):
            chunk = prompt[start : start + size]
            last = start + len(chunk) == len(prompt)
            answer = rig.run([PassSeq(slot, start, chunk, flags=SAMPLE if last else 0, logprobs=5 if last else 0)])
        _require_same(rig, whole, answer, f"prefill in chunks of {size}")


@_check
def a_row_does_not_depend_on_its_batch(rig: Rig) -> None:
    """Eight sequences in one pass, among them decode and prefill, answer as each does alone."""
    prompts = [_prompt(rig, 20 + slot, 3 + slot) for slot in range(8)]
    alone: list[Answer] = []
    for slot, prompt in enumerate(prompts):
        rig.map_row(slot, _frames_of(slot), len(prompt))
        alone.append(rig.run([PassSeq(slot, 0, prompt)]))
    # The even ones have their prefix from above and decode; the odd ones start over in spoilt frames.
    batch: list[PassSeq] = []
    for slot, prompt in enumerate(prompts):
        start = len(prompt) - 1 if slot % 2 == 0 else 0
        if start == 0:
            rig.spoil(_frames_of(slot))
        batch.append(PassSeq(slot, start, prompt[start:]))
    together = rig.run(batch)
    for slot, answer in enumerate(alone):
        one = Answer([together.tokens[slot]], [together.logprobs[slot]], [], [], together.stats)
        _require_same(rig, answer, one, f"sequence {slot} of 8")


@_check
def what_a_row_maps_is_what_attention_reads(rig: Rig) -> None:
    """The control of every check above: altering a mapped frame changes the answer, altering another does not."""
    prompt = _prompt(rig, 4, rig.block_tokens + 2)
    rig.map_row(0, [20, 21], len(prompt))
    rig.run([PassSeq(0, 0, prompt)])
    decode = PassSeq(0, len(prompt) - 1, prompt[-1:], flags=FORWARD, logprobs=8)
    healthy = rig.run([decode])
    kept = rig.frame(20)
    rig.map_row(1, [23], 4)
    rig.run([PassSeq(1, 0, _prompt(rig, 5, 4))])
    require(rig.run([decode]).tops == healthy.tops, "writing an unmapped frame changed the answer")
    rig.set_frame(20, bytes(len(kept)))
    require(rig.run([decode]).tops != healthy.tops, "the content of a mapped frame does not matter")
    rig.set_frame(20, kept)
    require(rig.run([decode]).tops == healthy.tops, "restoring the frame does not restore the answer")


@_check
def write_from_is_respected(rig: Rig) -> None:
    """Recomputing tokens whose KV is there already writes nothing and answers the same (a prompt that hits whole)."""
    prompt = _prompt(rig, 6, rig.block_tokens)
    rig.map_row(0, [24], len(prompt))
    whole = rig.run([PassSeq(0, 0, prompt)])
    end = len(prompt)
    # `run` itself fails when a frame below write_from changes.
    _require_same(rig, whole, rig.run([PassSeq(0, end - 1, prompt[-1:], write_from=end)]), "the last token recomputed")
    _require_same(
        rig, whole, rig.run([PassSeq(0, 0, prompt, write_from=end)]), "a whole prompt recomputed without writing"
    )
    # Other tokens than those whose KV is there: a driver that writes after all cannot hide behind equal bytes.
    rig.run([PassSeq(0, 0, [(token + 1) % rig.probe.vocab_tokens for token in prompt], write_from=end)])


@_check
def copies_are_made_first_and_in_order(rig: Rig) -> None:
    """A copy of a copy sees the first one, and a sequence of the same pass sees both: copy-on-write of a tail."""
    prompt = _prompt(rig, 7, rig.block_tokens - 1)
    rig.map_row(0, [25], rig.block_tokens)
    rig.run([PassSeq(0, 0, prompt)])
    shared = rig.frame(25)
    rig.map_row(1, [27], rig.block_tokens)
    forked = rig.run([PassSeq(1, len(prompt), [3])], copies=[(25, 26), (26, 27)])
    require(rig.frame(26) == shared, "the first copy of a chain is not its source")
    require(rig.frame(27) != rig.frame(26), "the token after a copy was not written")
    require(rig.frame(25) == shared, "copy-on-write changed its source")
    _require_same(rig, rig.run([PassSeq(0, len(prompt), [3])]), forked, "a fork and its origin")
    require(
        rig.frame(27) == rig.frame(25) or not _exact(rig),
        "a fork's frame differs from its origin's after the same token",
    )


@_check
def two_messages_of_many_packets(rig: Rig) -> None:
    """Passes longer than a packet, one right after the other, arrive whole."""
    rig.map_row(0, [28], 3)
    prompt = _prompt(rig, 8, 3)
    rig.run([PassSeq(0, 0, prompt)])
    content = rig.frame(28)
    n_copies = 2 * PACKET_BYTES // 8 + 7
    chain = [(28 + i % 5, 28 + (i + 1) % 5) for i in range(n_copies)]
    effects = [rig.effect([PassSeq(0, 0, prompt)], chain) for _ in range(2)]
    for effect in effects:
        rig.send(exec_message(effect))
    answers = rig.until_health()
    require(
        [answer[:2] for answer in answers] == [["done", effect.seq] for effect in effects], f"answered {answers!r:.300}"
    )
    require(all(answer[6][3] == n_copies for answer in answers), f"{n_copies} copies were counted as {answers!r:.300}")
    require(all(rig.frame(28 + i) == content for i in range(5)), "a long chain of copies did not arrive at its end")


# -- results ------------------------------------------------------------------------------------------------------


@_check
def forward_lists_the_most_likely_tokens(rig: Rig) -> None:
    """Distinct tokens, descending log-probabilities that do not exceed probability one, greedy on top."""
    prompt = _prompt(rig, 9, 6)
    rig.map_row(0, [33, 34], 6)
    greedy = rig.run([PassSeq(0, 0, prompt, logprobs=4)])
    looked = rig.run([PassSeq(0, 0, prompt, flags=FORWARD, logprobs=20)])
    require(not looked.tokens, "FORWARD drew a token")
    ids, logprobs = looked.tops[0]
    require(len(ids) == 20 and len(set(ids)) == 20, f"asked for 20 alternatives, got {ids}")
    require(all(0 <= token < rig.probe.vocab_tokens for token in ids), f"tokens outside the vocabulary: {ids}")
    require(logprobs == sorted(logprobs, reverse=True), "alternatives are not in descending order")
    require(sum(map(math.exp, logprobs)) <= 1 + 1e-4, "probabilities sum to more than one")
    require(ids[0] == greedy.tokens[0], "the most likely token is not the greedy one")
    require(_close(rig, logprobs[0], greedy.logprobs[0]), "two log-probabilities for one token")
    require(len(greedy.tops[0][0]) == 4 and greedy.tops[0][0][0] == ids[0], "alternatives beside a sample differ")


@_check
def a_mask_chooses_among_the_tokens_and_changes_no_log_probability(rig: Rig) -> None:
    """With ALLOWED the top k are the best of the allowed tokens, in the same order and with the same log-probabilities."""
    prompt = _prompt(rig, 9, 6)
    rig.map_row(0, [33, 34], 6)
    vocab = rig.probe.vocab_tokens
    every = rig.run([PassSeq(0, 0, prompt, flags=FORWARD, logprobs=min(vocab, 128))]).tops[0]
    among = [token for token in range(vocab) if token % 3 == 1]
    bits = sum(1 << token for token in among).to_bytes(-(-vocab // 8), "little")
    masked = PassSeq(0, 0, prompt, flags=FORWARD | ALLOWED, logprobs=8, allowed=bits)
    ids, logprobs = rig.run([masked]).tops[0]
    wanted = [pair for pair in zip(*every, strict=True) if pair[0] % 3 == 1][:8]
    require(len(ids) == min(8, len(among)) and all(token in among for token in ids), f"tokens not allowed: {ids}")
    for token, found, (best, logprob) in zip(ids, logprobs, wanted, strict=False):
        require(token == best and _close(rig, found, logprob), f"{token} ({found}) where {best} ({logprob}) is best")
    one = (1 << among[0]).to_bytes(-(-vocab // 8), "little")
    single = PassSeq(0, 0, prompt, flags=FORWARD | ALLOWED, logprobs=8, allowed=one)
    require(rig.run([single]).tops[0][0] == [among[0]], "one token is allowed, and something else came")


@_check
def scores_are_the_log_probabilities_of_given_tokens(rig: Rig) -> None:
    """SCORE returns one number per position from score_from on, and agrees with what greedy reported."""
    prompt = _prompt(rig, 10, 5)
    rig.map_row(0, [35, 36], 6)
    greedy = rig.run([PassSeq(0, 0, prompt)])
    text = [*prompt, greedy.tokens[0]]
    for score_from, expected in ((0, 5), (1, 5), (3, 3), (5, 1)):
        scores = rig.run([PassSeq(0, 0, text, flags=SCORE, score_from=score_from)]).scores[0]
        require(
            len(scores) == expected, f"score_from {score_from} of 6 tokens gave {len(scores)} scores, not {expected}"
        )
        require(
            _close(rig, scores[-1], greedy.logprobs[0]),
            f"score {scores[-1]} of a token drawn with {greedy.logprobs[0]}",
        )
        require(all(score <= 0 for score in scores), f"a log-probability above zero: {scores}")


@_check
def a_draw_depends_on_seed_and_position_only(rig: Rig) -> None:
    """The same seed draws the same token, whatever was run in between; seeds differ from one another."""
    prompt = _prompt(rig, 11, 4)
    rig.map_row(0, [37], 4)
    draws = [
        rig.run([PassSeq(0, 0, prompt, temperature=1.5, seed=seed)]).tokens[0] for seed in (*range(12), *range(12))
    ]
    require(draws[:12] == draws[12:], "the same seed drew different tokens")
    require(len(set(draws)) > 1, "twelve seeds drew one token: sampling ignores them")


@_check
def penalties_see_the_history(rig: Rig) -> None:
    """A bonus (a negative presence penalty) makes a generated token win, and none that is part of the prompt."""
    n = 2 * rig.block_tokens
    rig.map_row(0, [38, 39], n)
    texts = (_prompt(rig, 100 + attempt, n) for attempt in range(64))
    text, greedy = next(
        (text, greedy) for text in texts if (greedy := rig.run([PassSeq(0, 0, text)]).tokens[0]) not in text
    )  # fmt: skip
    rewarded = PassSeq(0, 0, text, flags=SAMPLE | HISTORY, presence_penalty=-1000.0, prompt_tokens=n // 2, history=text)
    token = rig.run([rewarded]).tokens[0]
    require(token in text[n // 2 :], f"drew {token} where only {text[n // 2 :]} had a bonus")
    rewarded.prompt_tokens = n
    require(rig.run([rewarded]).tokens[0] == greedy, "a presence penalty was applied to the prompt")


# -- refusals -----------------------------------------------------------------------------------------------------


@_check
def a_stale_generation_fails_the_pass(rig: Rig) -> None:
    """A row that was released since must not be read, nor anything written."""
    prompt = _prompt(rig, 12, 4)
    rig.map_row(0, [1], 4, generation=7)
    code = rig.refused(exec_message(rig.effect([PassSeq(0, 0, prompt, generation=6)], copies=[(2, 3)])))
    require(code == E.ESTALE, f"a stale generation gave errno {code}, not ESTALE ({int(E.ESTALE)})")
    rig.run([PassSeq(0, 0, prompt)])


@_check
def malformed_passes_are_refused_and_survived(rig: Rig) -> None:
    """Each is answered `failed` with a reason, changes nothing, and the driver goes on."""
    prompt = _prompt(rig, 13, 4)
    rig.map_row(0, [1], 4)
    rig.map_row(1, [rig.probe.capacity_frames], 4)
    rig.map_row(2, [-1], 4)
    good = rig.effect([PassSeq(0, 0, prompt)])
    wrong = {
        "a cut record": good._replace(seqs=good.seqs[:-1]),
        "a cut token": good._replace(tokens=good.tokens[:-1]),
        "missing tokens": good._replace(tokens=good.tokens[:-4]),
        "half a copy": good._replace(copies=bytes(4)),
        "a copy to nowhere": rig.effect([PassSeq(0, 0, prompt)], copies=[(1, rig.probe.capacity_frames)]),
        "a copy from nowhere": rig.effect([PassSeq(0, 0, prompt)], copies=[(-1, 2)]),
        "a frame past the end": rig.effect([PassSeq(1, 0, prompt)]),
        "an unmapped entry": rig.effect([PassSeq(2, 0, prompt)]),
        "too few entries": rig.effect([PassSeq(0, 0, prompt, entries=0)]),
        "too many entries": rig.effect([PassSeq(0, 0, prompt, entries=rig.layout.entries + 1)]),
        "more tokens than mapped": rig.effect([PassSeq(0, 3, prompt, entries=1)]),
        "no tokens": rig.effect([PassSeq(0, 0, [])]),
        "a token past the vocabulary": rig.effect([PassSeq(0, 0, [1, rig.probe.vocab_tokens])]),
        "a negative token": rig.effect([PassSeq(0, 0, [1, -1])]),
        "a slot past the end": good._replace(seqs=_with_slot(good.seqs, rig.layout.slots)),
        "a negative slot": good._replace(seqs=_with_slot(good.seqs, -1)),
        "a bad second sequence": rig.effect([PassSeq(0, 0, prompt), PassSeq(2, 0, prompt)]),
    }
    for number, (what, effect) in enumerate(wrong.items(), start=1_000_000):
        try:
            rig.refused(exec_message(effect._replace(seq=number)))
        except Nonconformance as problem:
            raise Nonconformance(f"{what}: {problem}") from problem
    for message in (["exec", 2_000_000], ["exec", 2_000_001, 1, 2, 3, 4], [*exec_message(good)[:5], b"no list"]):
        rig.refused(message)
    rig.run([PassSeq(0, 0, prompt)])


@_check
def dropped_frames_are_scrubbed(rig: Rig) -> None:
    """What was in a dropped frame cannot be read by whoever gets it next; other frames stay."""
    before = rig.digests()
    rig.send(["drop", 77, [2, 5]])
    answers = rig.until_health()
    require(answers == [["dropped", 77]], f"drop was answered with {answers!r:.200}")
    require(not any(rig.frame(2)) and not any(rig.frame(5)), "a dropped frame is not all zeros")
    rig.require_unchanged(before, {2, 5})


@_check
def it_exits_when_its_channel_closes(rig: Rig) -> None:
    """Status 0, within the deadline, without a signal.  The last check: it ends the driver."""
    rig.channel.close()
    status = rig.wait_for_exit()
    require(status is not None, f"it still runs {rig.deadline_s:g} s after its channel was closed")
    require(status == os.EX_OK, f"it exited with status {status} when its channel was closed")


# -- means --------------------------------------------------------------------------------------------------------


def _prompt(rig: Rig, seed: int, n: int) -> list[int]:
    """n token ids, different for every seed, within any vocabulary of 64 or more."""
    state, tokens = seed * 2654435761 % 2**32, []
    for _ in range(n):
        state = (state * 1664525 + 1013904223) % 2**32  # Numerical Recipes' generator: no global state, same everywhere
        tokens.append((state >> 16) % rig.probe.vocab_tokens)
    return tokens


def _frames_of(slot: int) -> list[int]:
    """Four frames per slot, not in order, for checks that use eight slots."""
    return [4 * slot + offset for offset in (2, 0, 3, 1)]


def _exact(rig: Rig) -> bool:
    return rig.probe.numerics == "invariant"


def _close(rig: Rig, a: float, b: float) -> bool:
    return abs(a - b) <= (ROUNDING if _exact(rig) else TOLERANCE)


def _require_same(rig: Rig, expected: Answer, got: Answer, what: str) -> None:
    """Two answers agree: exactly when the numerics are invariant, else unless the margin is within the tolerance."""
    near = all(_close(rig, a, b) for a, b in zip(expected.logprobs, got.logprobs, strict=True))
    same = near and (expected.tokens == got.tokens or not _exact(rig))
    require(same, f"{what}: {got.tokens} {got.logprobs}, expected {expected.tokens} {expected.logprobs}")


def _with_slot(seqs: bytes, slot: int) -> bytes:
    records: Sequence[bytes] = [seqs[at : at + SEQ_BYTES] for at in range(0, len(seqs), SEQ_BYTES)]
    return b"".join(slot.to_bytes(4, "little", signed=True) + record[4:] for record in records)
