"""A `tokenizers.Tokenizer` out of the vocabulary in a GGUF file.

GGUF keeps the pieces, their kinds and either merges ("gpt2": byte-level BPE) or scores ("llama": SentencePiece), and
names the rule that cuts text into words (`tokenizer.ggml.pre`).  The rules below are those of the models' own
tokenizer.json; an unknown name is refused, since wrong tokens would be served without any sign of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
BYTE: Final = 6

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class UnsupportedTokenizer(ValueError):
    """The model's tokenizer is of a kind that is not implemented; the message names it."""


class WordRule(NamedTuple):
    """How one family of byte-level tokenizers cuts text before merging.

    splits         pre-tokenizers, in order, before the byte mapping
    nfc            text is composed (Unicode NFC) first
    whole_words    a word that is a token is taken without looking at merges
    begins         a text begins with the beginning-of-text token unless the file says otherwise
    """

    splits: tuple[Any, ...]
    nfc: bool = False
    whole_words: bool = False
    begins: bool = False


def _regex(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _word_rules() -> dict[str, WordRule]:
    gpt2 = WordRule((_regex(_GPT2),))
    smollm = WordRule((pre_tokenizers.Digits(individual_digits=True), _regex(_GPT2)))
    llama3 = WordRule((_regex(_LLAMA3),), whole_words=True, begins=True)
    qwen2 = WordRule((_regex(_QWEN2),), nfc=True)
    # What llama.cpp does for files without the name of a rule: punctuation, then GPT-2's words, then digits in threes.
    default = WordRule(
        (
            _regex(r"[\p{P}\$\+<=>\^~\|]+"),
            _regex(_GPT2.removesuffix(r"|\s+")),
            _regex(r"\p{N}+"),
            _regex(r"[0-9][0-9][0-9]"),
        )
    )
    return {
        "default": default,
        "gpt-2": gpt2,
        "smollm": smollm,
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "qwen2": qwen2,
        "deepseek-r1-qwen": qwen2,
    }


class GgufTokenizer(NamedTuple):
    """tokenizer; style of its pieces ("bytes": GPT-2's byte alphabet, "spaces": SentencePiece); BOS before a text?"""

    tokenizer: Tokenizer
    style: str
    begins: bool


def build_tokenizer(fields: Mapping[str, Any]) -> GgufTokenizer:
    """Build the tokenizer from the header's fields.  Error: UnsupportedTokenizer; KeyError when a list is missing."""
    model = fields.get("tokenizer.ggml.model")
    pieces: Sequence[str] = fields["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    if model == "gpt2":
        built = _byte_level(fields, pieces)
    elif model == "llama":
        built = _sentencepiece(fields, pieces, kinds)
    else:
        raise UnsupportedTokenizer(f"GGUF tokenizer model {model!r} is not supported (gpt2 and llama are)")
    built.tokenizer.add_special_tokens(
        [_whole(piece, True) for piece, kind in zip(pieces, kinds, strict=True) if kind == CONTROL]
    )
    built.tokenizer.add_tokens(
        [_whole(piece, False) for piece, kind in zip(pieces, kinds, strict=True) if kind == USER_DEFINED]
    )
    begins = fields.get("tokenizer.ggml.add_bos_token", built.begins)
    return built._replace(begins=bool(begins))


def _whole(piece: str, special: bool) -> AddedToken:
    return AddedToken(piece, special=special, normalized=False)


def _byte_level(fields: Mapping[str, Any], pieces: Sequence[str]) -> GgufTokenizer:
    rules = _word_rules()
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in rules:
        raise UnsupportedTokenizer(
            f"GGUF tokenizer.ggml.pre {name!r} is not supported (known: {', '.join(sorted(rules))}); "
            "use the model's Hugging Face directory, whose tokenizer.json needs no such rule"
        )
    rule = rules[name]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*rule.splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return GgufTokenizer(tokenizer, "bytes", rule.begins)


def _sentencepiece(fields: Mapping[str, Any], pieces: Sequence[str], kinds: Sequence[int]) -> GgufTokenizer:
    """SentencePiece's BPE joins the pair whose union scores best: merges in the order of the unions' scores."""
    scores: Sequence[float] = fields["tokenizer.ggml.scores"]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    joinable = {piece for piece, kind in zip(pieces, kinds, strict=True) if kind == NORMAL}
    ranked: list[tuple[float, int, str, str]] = []
    for piece in joinable:
        token = vocabulary[piece]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in joinable and right in joinable:
                ranked.append((-scores[token], token, left, right))
    ranked.sort()
    unknown = int(fields.get("tokenizer.ggml.unknown_token_id", 0))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, left, right in ranked],
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return GgufTokenizer(tokenizer, "spaces", True)
