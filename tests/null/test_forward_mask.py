"""`forward` with a mask: the answer keeps to it, in one pass beside others without, and a bad mask is refused before anything runs."""

from __future__ import annotations

from attnix.drivers.sim_model import DEFAULT_VOCAB, reference_distribution
from attnix.kernel.errors import E
from attnix.simulated import ints
from attnix.syscalls.records import unpack_floats, unpack_ids

from .small import PROMPT, refused, small


def mask(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(DEFAULT_VOCAB // 8, "little")


def test_the_answer_is_the_best_of_the_allowed_tokens_with_the_models_own_log_probabilities() -> None:
    system = small()
    client = system.connect()
    says = reference_distribution(PROMPT)
    unlikely = [token for token in range(DEFAULT_VOCAB) if token not in says.tokens][:2]
    allowed = [says.tokens[20], says.tokens[3], *unlikely]
    contexts = [client.call("alloc_context").ctx for _ in range(3)]
    for ctx in contexts:
        client.call("append", ctx, ints(PROMPT))
    system.run()
    asked = [
        client.post("forward", contexts[0], 4),
        client.post("forward", contexts[1], 3, mask(*allowed)),
        client.post("forward", contexts[2], 20, mask(unlikely[1])),
    ]
    system.run()
    plain, masked, single = (client.result(request) for request in asked)
    assert list(unpack_ids(plain.tokens)) == says.tokens[:4]
    assert list(unpack_ids(masked.tokens)) == [says.tokens[3], says.tokens[20], min(unlikely)]
    for token, logprob in zip(unpack_ids(masked.tokens), unpack_floats(masked.logprobs), strict=True):
        assert abs(logprob - says.logprob(token)) < 1e-6
    assert list(unpack_ids(single.tokens)) == [unlikely[1]]
    assert client.call("stat", contexts[1]).tokens == len(PROMPT), "the context stays as it is"


def test_a_mask_of_another_size_or_of_no_token_is_refused() -> None:
    client = small().connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT))
    for bad in (b"\xff", bytes(DEFAULT_VOCAB // 8 + 1), bytes(DEFAULT_VOCAB // 8)):
        assert refused(E.EINVAL, client, "forward", ctx, 4, bad)["field"] == "allowed"


def test_tokens_are_appended_and_computed_in_the_pass_that_answers() -> None:
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT))
    system.run()
    log = list(PROMPT)
    for token in (7, 11, 13, 2, 9):
        log.append(token)
        asked = client.post("forward", ctx, 3, b"", ints([token]))
        system.run()
        assert list(unpack_ids(client.result(asked).tokens)) == reference_distribution(log).tokens[:3]
    row = client.call("stat", ctx)
    assert row.tokens == row.usage.computed_tokens == len(log), "each token once"
    assert refused(E.EINVAL, client, "forward", ctx, 3, b"", b"\x01")["message"]
    assert client.call("stat", ctx).tokens == len(log)
