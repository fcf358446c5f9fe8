"""The simulated model: a hash in the place of a transformer, in which no mapping error can hide.

A token's KV is 8 bytes: a BLAKE2b digest of the token, its home position and *every KV entry before it*, as attention
found them through the page table.  What the model says after a token is a digest of the entries 0..p, again as found.
So a wrong frame, stale bytes, a copy-on-write that did not happen, a miscounted entry or a block computed before its
prefix was there changes everything that follows, as it would in a transformer, and with certainty instead of slightly.

`reference_*` compute the same from the token list alone, with no frames and no page table: they are the oracle.

Logits are sparse: 32 candidate tokens (all of them in a smaller vocabulary) have logits of their own, every other token
has FLOOR_LOGIT.  Sampling draws from the candidates, and from the history when penalties are on.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

KV_BYTES: Final = 8  # KV of one token
CANDIDATES: Final = 32
FLOOR_LOGIT: Final = -6.0
DEFAULT_VOCAB: Final = 256

_TOKEN_HOME: Final = struct.Struct("<iq")
_SEED_POSITION: Final = struct.Struct("<Qq")
_WORDS: Final = struct.Struct(f"<{2 * CANDIDATES}I")


class Sampling(Protocol):
    """The sampling fields of a `Seq` (kernel/batch.py says what each means and which value turns it off)."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...


class SamplingChoice(NamedTuple):
    """Sampling parameters for the reference functions; the defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


GREEDY: Final = SamplingChoice()


class Distribution(NamedTuple):
    """What the model thinks of the next token: candidates, most likely first, and one logit for all others."""

    vocab: int
    tokens: list[int]
    logits: list[float]
    log_total: float

    def logprob(self, token: int) -> float:
        """Log-probability of any token of the vocabulary."""
        logit = self.logits[self.tokens.index(token)] if token in self.tokens else FLOOR_LOGIT
        return logit - self.log_total

    def top(self, k: int, allowed: bytes = b"") -> tuple[list[int], list[float]]:
        """The k most likely tokens and their log-probabilities; fewer when there are fewer.  allowed: as in kernel/events.py."""

        def may(token: int) -> bool:
            return not allowed or bool(allowed[token >> 3] >> (token & 7) & 1)

        tokens = [token for token in self.tokens if may(token)][:k]
        chosen = set(tokens)
        for token in range(self.vocab):
            if len(tokens) >= k:
                break
            if token not in chosen and may(token):
                tokens.append(token)
        return tokens, [self.logprob(token) for token in tokens]


class Trail:
    """The running digest of the KV entries of one context, in logical order."""

    def __init__(self, model: str) -> None:
        self._hash = hashlib.blake2b(digest_size=16, key=model.encode()[:64])

    def absorb(self, entries: bytes | memoryview) -> None:
        """Attend to the next entries (KV_BYTES each)."""
        self._hash.update(entries)

    def entry(self, token: int, home: int) -> bytes:
        """The KV of `token` at home position `home`, given all entries absorbed so far; KV_BYTES long."""
        before = self._hash.digest()
        return hashlib.blake2b(_TOKEN_HOME.pack(token, home) + before, digest_size=KV_BYTES).digest()

    def distribution(self, token: int, vocab: int) -> Distribution:
        """What follows `token` (the query), given the entries absorbed so far, its own included."""
        query = self._hash.digest() + _TOKEN_HOME.pack(token, 0)
        words = _WORDS.unpack(hashlib.shake_128(query).digest(_WORDS.size))
        ids: list[int] = []
        taken: set[int] = set()
        for rank in range(min(CANDIDATES, vocab)):
            candidate = words[rank] % vocab
            while candidate in taken:  # the next free id: still a function of the digest alone
                candidate = (candidate + 1) % vocab
            taken.add(candidate)
            ids.append(candidate)
        # Descending with a random gap in (0, 0.5]: never a tie, so greedy has one answer.
        logits: list[float] = []
        logit = 4.0
        for rank in range(len(ids)):
            logit -= (1 + words[CANDIDATES + rank] % 1024) / 2048
            logits.append(logit)
        return _normalised(vocab, ids, logits)


def _normalised(vocab: int, tokens: list[int], logits: list[float]) -> Distribution:
    total = sum(math.exp(logit) for logit in logits) + (vocab - len(tokens)) * math.exp(FLOOR_LOGIT)
    return Distribution(vocab, tokens, logits, math.log(total))


def scripted(model_says: Distribution, token: int) -> Distribution:
    """The distribution of a script that wants `token` now: the same logits with that token on top."""
    tokens = [token, *(other for other in model_says.tokens if other != token)][: len(model_says.tokens)]
    return _normalised(model_says.vocab, tokens, model_says.logits)


def sample(
    model_says: Distribution, choice: Sampling, position: int, history: Sequence[int] = (), prompt_tokens: int = 0
) -> int:
    """Draw the token at `position`; the same arguments always draw the same token (DESIGN.md §10, item 7).

    history        the context's tokens so far, for the penalties; empty when they are off
    prompt_tokens  how many of them are the prompt, which presence and frequency penalties skip
    """
    tokens, logits = model_says.tokens, list(model_says.logits)
    if history:
        generated = history[prompt_tokens:]
        seen = set(history)
        tokens = tokens + sorted(seen.difference(tokens))  # a bonus can lift any token of the history
        logits += [FLOOR_LOGIT] * (len(tokens) - len(logits))
        for rank, token in enumerate(tokens):
            if token in seen:
                logit, penalty = logits[rank], choice.repetition_penalty
                logits[rank] = logit / penalty if logit > 0 else logit * penalty
            n_generated = generated.count(token)
            if n_generated:
                logits[rank] -= choice.presence_penalty + choice.frequency_penalty * n_generated
    ranks = sorted(range(len(tokens)), key=lambda rank: (-logits[rank], tokens[rank]))
    if choice.temperature == 0:
        return tokens[ranks[0]]
    if choice.top_k > 0:
        ranks = ranks[: choice.top_k]
    best = logits[ranks[0]]
    weights = [math.exp((logits[rank] - best) / choice.temperature) for rank in ranks]
    total = sum(weights)
    kept: list[tuple[int, float]] = []
    mass = 0.0
    for rank, weight in zip(ranks, weights, strict=True):
        if kept and (mass >= choice.top_p * total or weight < choice.min_p):
            break
        kept.append((rank, weight))
        mass += weight
    digest = hashlib.blake2b(_SEED_POSITION.pack(choice.seed, position), digest_size=8).digest()
    left = int.from_bytes(digest, "little") / 2**64 * mass
    for rank, weight in kept:
        left -= weight
        if left < 0:
            return tokens[rank]
    return tokens[kept[-1][0]]


# -- the oracle ---------------------------------------------------------------------------------------------------


def reference_entries(tokens: Sequence[int], *, model: str = "sim") -> list[bytes]:
    """The KV entry of every token of a context that starts at position 0 and has no relocated parts."""
    trail = Trail(model)
    entries: list[bytes] = []
    for home, token in enumerate(tokens):
        entries.append(trail.entry(token, home))
        trail.absorb(entries[-1])
    return entries


def reference_distribution(tokens: Sequence[int], *, vocab: int = DEFAULT_VOCAB, model: str = "sim") -> Distribution:
    """What the model says after `tokens` (at least one)."""
    trail = Trail(model)
    trail.absorb(b"".join(reference_entries(tokens, model=model)))
    return trail.distribution(tokens[-1], vocab)


def reference_tokens(
    prompt: Sequence[int],
    n: int,
    *,
    vocab: int = DEFAULT_VOCAB,
    choice: Sampling = GREEDY,
    script: Sequence[int] = (),
    model: str = "sim",
) -> list[int]:
    """The n tokens that follow `prompt` (at least one token): what any correct kernel must produce on a SimDevice.

    Penalties, when on, see the prompt and everything generated so far.
    """
    tokens = list(prompt)
    trail = Trail(model)
    for entry in reference_entries(tokens, model=model):
        trail.absorb(entry)
    penalised = has_penalties(choice)
    for index in range(n):
        model_says = trail.distribution(tokens[-1], vocab)
        if index < len(script):
            token = script[index]
        else:
            token = sample(model_says, choice, len(tokens), tokens if penalised else (), len(prompt))
        trail.absorb(trail.entry(token, len(tokens)))
        tokens.append(token)
    return tokens[len(prompt) :]


def reference_scores(
    tokens: Sequence[int], first: int, *, vocab: int = DEFAULT_VOCAB, model: str = "sim"
) -> list[float]:
    """Log P(token p | tokens before it) for p = max(first, 1) .. len(tokens) - 1."""
    trail = Trail(model)
    scores: list[float] = []
    for position, entry in enumerate(reference_entries(tokens, model=model)):
        if position >= max(first, 1):
            scores.append(trail.distribution(tokens[position - 1], vocab).logprob(tokens[position]))
        trail.absorb(entry)
    return scores


def has_penalties(choice: Sampling) -> bool:
    """Whether a sampler with these parameters needs the context's history."""
    return choice.repetition_penalty != 1.0 or choice.presence_penalty != 0.0 or choice.frequency_penalty != 0.0
