"""Tokenizer, chat template and streamed text: everything between characters and the kernel's token ids."""

from __future__ import annotations

from .conversation import Piece, piece_tokens, pieces
from .detokenize import Detokenizer, StopScanner, TextStream, TokenTable
from .gguf_tokenizer import UnsupportedTokenizer
from .loading import load_text
from .template import ChatMessage, TemplateError
from .tokenizer import LONG_CHARS, TAIL_TOKENS, TextModel

__all__ = [
    "LONG_CHARS",
    "TAIL_TOKENS",
    "ChatMessage",
    "Detokenizer",
    "Piece",
    "StopScanner",
    "TemplateError",
    "TextModel",
    "TextStream",
    "TokenTable",
    "UnsupportedTokenizer",
    "load_text",
    "piece_tokens",
    "pieces",
]
