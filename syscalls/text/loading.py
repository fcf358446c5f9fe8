"""A model's files to its `TextModel`: Hugging Face directories and GGUF files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from attnix.gguf_header import GgufError, read_header

from .gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UnsupportedTokenizer, build_tokenizer
from .template import ChatTemplate
from .tokenizer import TextModel

# Tokens that end a turn or a text in the supported families; the model's own eos is added whatever its name.
_END_NAMES: Final = frozenset(
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "</s>"]
)
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_text(path: str | Path) -> TextModel:
    """Load tokenizer and chat template of the model at `path`: a Hugging Face directory or a GGUF file.

    Error: UnsupportedTokenizer or GgufError (both ValueError) with what is wrong; FileNotFoundError.
    """
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    return _from_gguf(path)


# -- Hugging Face directory ---------------------------------------------------------------------------------------


def _from_directory(path: Path) -> TextModel:
    file = path / "tokenizer.json"
    if not file.exists():
        raise UnsupportedTokenizer(
            f"{path} has no tokenizer.json: save the tokenizer once with a fast tokenizer (save_pretrained)"
        )
    text = file.read_text("utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library has no narrower class
        raise UnsupportedTokenizer(f"{file} is no tokenizer that can be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    described = json.loads(text)
    settings = _json(path / "tokenizer_config.json")
    style = _style(described.get("decoder"), described.get("model", {}), file)
    added = tokenizer.get_added_tokens_decoder()
    special_ids = [token for token, entry in added.items() if entry.special]
    literal = {token: entry.content for token, entry in added.items()}
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    pieces = [_piece(tokenizer.id_to_token(token) or "", style, literal.get(token)) for token in range(size)]
    names = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    stops = [*_ids(_json(path / "generation_config.json").get("eos_token_id"))]
    stops += _ids(_json(path / "config.json").get("eos_token_id"))
    stops += [token for token in special_ids if literal[token] in _END_NAMES or literal[token] == names["eos_token"]]
    return TextModel(
        path=file,
        tokenizer=tokenizer,
        pieces=pieces,
        style=style,
        special_ids=special_ids,
        prefix_ids=tokenizer.encode("", add_special_tokens=True).ids,
        stop_ids=stops,
        template=_directory_template(path, settings, names),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise UnsupportedTokenizer(f"{path} does not hold a JSON object")
    return value


def _content(token: Any) -> str:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])


def _directory_template(path: Path, settings: dict[str, Any], names: dict[str, str]) -> ChatTemplate | None:
    file = path / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return None if source is None else ChatTemplate(source, names)


def _style(decoder: Any, model: dict[str, Any], file: Path) -> str:
    kinds: list[str] = []
    if isinstance(decoder, dict):
        kinds = [decoder.get("type", "")] + [step.get("type", "") for step in decoder.get("decoders", [])]
    if "ByteLevel" in kinds:
        return "bytes"
    if model.get("byte_fallback") or "ByteFallback" in kinds or "Metaspace" in kinds:
        return "spaces"
    raise UnsupportedTokenizer(f"{file}: pieces are neither byte-level (GPT-2) nor SentencePiece; decoder {kinds}")


# -- GGUF ---------------------------------------------------------------------------------------------------------


def _from_gguf(path: Path) -> TextModel:
    fields = read_header(path).fields
    try:
        built = build_tokenizer(fields)
    except KeyError as error:
        raise GgufError(f"{path}: the file has no {error.args[0]}; it holds weights without a tokenizer") from error
    words: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(words)
    as_bytes = (NORMAL, BYTE)
    pieces = [
        _piece(word, built.style, None if kind in as_bytes else word) for word, kind in zip(words, kinds, strict=True)
    ]
    special_ids = [token for token, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
    stops = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    stop_ids = [token for token in stops if token is not None]
    stop_ids += [token for token in special_ids if words[token] in _END_NAMES]
    begin = fields.get("tokenizer.ggml.bos_token_id")

    def name(key: str) -> str:
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        return words[token] if token is not None else ""

    source = fields.get("tokenizer.chat_template")
    names = {
        "bos_token": name("bos"),
        "eos_token": name("eos"),
        "unk_token": name("unknown"),
        "pad_token": name("padding"),
    }
    return TextModel(
        path=path,
        tokenizer=built.tokenizer,
        pieces=pieces,
        style=built.style,
        special_ids=special_ids,
        prefix_ids=[begin] if built.begins and begin is not None else [],
        stop_ids=stop_ids,
        template=None if source is None else ChatTemplate(source, names),
    )


# -- pieces -------------------------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (github.com/openai/gpt-2, encoder.py): character -> byte.

    Bytes that print in Latin-1 stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES: Final = _byte_alphabet()


def _piece(word: str, style: str, literal: str | None) -> bytes:
    """The bytes of one vocabulary entry; `literal` when it is an added token, whose text stands for itself."""
    if literal is not None:
        return literal.encode()
    if style == "bytes":
        if all(char in _BYTES for char in word):
            return bytes(_BYTES[char] for char in word)
        return word.encode()
    match = _BYTE_PIECE.fullmatch(word)
    return bytes([int(match.group(1), 16)]) if match else word.replace("▁", " ").encode()
