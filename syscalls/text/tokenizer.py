"""Text for one model: encode, render chats, decode.  `loading.py` makes a TextModel out of a model's files.

The daemon's text process owns a `TextModel`; the kernel sees token ids only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from .detokenize import TextStream, TokenTable
from .template import ChatMessage, ChatTemplate, TemplateError, awaits_reply

# One text at a time: threads would gain nothing, and a pool of them makes the package warn at every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TAIL_TOKENS: Final = 64  # `append_messages` looks at so many of a context's last tokens
LONG_CHARS: Final = 1 << 17  # from here on a text is a long one: a tenth of a second and more

_QUESTION: Final = ChatMessage("user", "question")
_ANSWER: Final = ChatMessage("assistant", "answer")
# Stands for markup in a message's content.  No shield can begin inside another: all are found in one walk over a text.
SHIELD: Final = re.compile("\ue000[0-9]+:[0-9]+\ue001")
_MARK: Final = re.compile("\ue000([0-9]+):")
_ANCHORS: Final = ("\0", "\n")  # the first is a byte token, which joins with nothing, where there are byte tokens


class TextModel:
    """Everything that turns text into tokens and back for one model.  Any thread may use it: nothing in it changes.

    path          the file a client can load to tokenize by itself
    vocab_tokens  ids the tokenizer knows
    prefix_ids    tokens an empty context begins with before plain text (beginning-of-text), often none
    stop_ids      tokens that end a generation
    special_ids   control tokens: never shown as text, and only written by the template or with allow_special
    """

    def __init__(
        self,
        *,
        path: Path,
        tokenizer: Tokenizer,
        pieces: Sequence[bytes],
        style: str,
        special_ids: Iterable[int],
        prefix_ids: Iterable[int],
        stop_ids: Iterable[int],
        template: ChatTemplate | None,
    ) -> None:
        self.path = path
        self.prefix_ids = tuple(prefix_ids)
        self.special_ids = frozenset(special_ids)
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self.table = TokenTable(pieces, self.special_ids)
        self._names = [bytes(piece) for piece in pieces]
        # Two, since whether markup is a token is a mode of the tokenizer: switched by one thread, it would be another's too, and
        # what somebody wrote would become a control token.
        self._plain, self._marked = tokenizer, Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens, self._marked.encode_special_tokens = True, False
        self._style = style
        self._template = template
        names = (self._names[token].decode() for token in self.special_ids)
        markup = sorted(filter(None, names), key=len, reverse=True)  # the longest first: one may begin another
        self.markup = re.compile("|".join(map(re.escape, markup)) or r"(?!)")

    @property
    def vocab_tokens(self) -> int:
        return len(self.table)

    @property
    def token_bytes(self) -> list[bytes]:
        """id -> the bytes it stands for; for a special token, its name."""
        return self._names

    # -- text to tokens -------------------------------------------------------------------------------------------

    def encode(self, text: str, allow_special: bool = False, continues: bool = False) -> list[int]:
        """Token ids of `text`, without any prefix.

        allow_special  markup such as <|im_end|> becomes its token; else it is ordinary text
        continues      the text follows other text in a context: no word prefix is invented (SentencePiece models)
        """
        if continues and self._style == "spaces":
            # These tokenizers put a space before a text, but not behind a character that is in it already.
            for anchor in _ANCHORS:
                lead = self._raw(anchor, False)
                ids = self._raw(anchor + text, allow_special)
                if ids[: len(lead)] == lead:  # the anchor did not join with what follows
                    return ids[len(lead) :]
        return self._raw(text, allow_special)

    def _raw(self, text: str, allow_special: bool) -> list[int]:
        if not text:
            return []
        tokenizer = self._marked if allow_special else self._plain
        # A batch of one: `encode` keeps the interpreter's lock, and a text of megabytes would hold up every other thread.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_text(self, text: str, context_tokens: int) -> list[int]:
        """What `append(text)` appends to a context of that length: plain text, behind the prefix when it is empty."""
        if context_tokens == 0:
            return [*self.prefix_ids, *self.encode(text)]
        return self.encode(text, continues=True)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of the tokens, control tokens left out."""
        return self.table.text(tokens)

    def stream(self, stops: Iterable[str] = ()) -> TextStream:
        """A new incremental decoder with stop strings, for one generation."""
        return TextStream(self.table, stops)

    # -- chats ----------------------------------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> ChatTemplate:
        """Error: TemplateError when the model has none."""
        return self._chat()

    def _chat(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateError("this model has no chat template: append text or token ids instead of messages")
        return self._template

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """The conversation as prompt text.  Error: TemplateError."""
        return self._chat().render(messages, add_generation_prompt)

    def render_delta(self, old: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> str:
        """What to append to a context that holds `old`, so that it equals the rendering of `old + new`.

        When `old` ends with a reply, the context ends with that reply's generated tokens: its turn is still open and
        the delta closes it.  A generation prompt follows when `new` asks for a reply.  Error: TemplateError.
        """
        if old and old[-1].role == "assistant":
            return self._chat().after_reply(old, new)
        return self._chat().after_turns(old, new)

    def append_messages(self, messages: Sequence[ChatMessage], tail: Sequence[int], context_tokens: int) -> list[int]:
        """Token ids that append `messages` to a context, knowing only how it ends; a fork or a truncation needs no more.

        tail            the last (up to TAIL_TOKENS) tokens of the context
        context_tokens  its length
        Where the context ends decides: nothing yet: the whole rendering.  Behind a complete turn: the turns.  Inside a
        reply, or any other text: the end of that turn first.  Right behind a generation prompt, when messages[0] is
        a reply: its content.  Markup inside a message's content is ordinary text.  Error: TemplateError.
        """
        chat = self._chat()
        if not messages:
            return []
        shielded, hidden = self._shield(messages)
        if context_tokens == 0:
            return self.encode_rendered(chat.render(shielded, awaits_reply(messages)), hidden, continues=False)
        tail = list(tail)
        gives_reply = messages[0].role == "assistant"
        if gives_reply and self._reply_prompt and tail[-len(self._reply_prompt) :] == self._reply_prompt:
            return self.encode_rendered(chat.after_prompt([_QUESTION], shielded), hidden)
        present = self._closing_present(tail)
        if gives_reply and present == len(self._closing):
            return self.encode_rendered(chat.after_turns([_QUESTION], shielded), hidden)
        ids = self.encode_rendered(chat.after_reply([_QUESTION, _ANSWER], shielded), hidden)
        return ids[present:] if ids[:present] == self._closing[:present] else ids

    @cached_property
    def _closing(self) -> list[int]:
        """Tokens that end a reply's turn."""
        return self.encode(self._chat().after_reply([_QUESTION, _ANSWER], []), allow_special=True, continues=True)

    @cached_property
    def _reply_prompt(self) -> list[int]:
        """Tokens that begin a reply's turn behind a question; none where the question's end does (Mistral)."""
        with_prompt, without = self.render([_QUESTION], True), self.render([_QUESTION], False)
        if not with_prompt.startswith(without):
            return []
        return self.encode(with_prompt[len(without) :], allow_special=True, continues=True)

    def _closing_present(self, tail: Sequence[int]) -> int:
        """How many of the closing tokens the context ends with already; a lone newline is no end of a turn."""
        closing = self._closing
        for present in range(len(closing), 0, -1):
            if list(tail[-present:]) == closing[:present] and not self.special_ids.isdisjoint(closing[:present]):
                return present
        return 0

    def _shield(self, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], dict[str, str]]:
        """Replace markup inside contents, so that a message cannot end its own turn and speak for somebody else.

        Returns the messages and what each replacement stands for.
        """
        contents = "".join(message.content for message in messages)
        if not self.markup.search(contents):
            return list(messages), {}
        mark = free_mark(contents)
        hidden: dict[str, str] = {}

        def hide(match: re.Match[str]) -> str:
            shield = f"{mark}{len(hidden)}\ue001"
            hidden[shield] = match.group()
            return shield

        return [ChatMessage(role, self.markup.sub(hide, content)) for role, content in messages], hidden

    def encode_rendered(self, text: str, hidden: Mapping[str, str], continues: bool = True) -> list[int]:
        """Encode with the template's markup as tokens and the contents' markup, put back, as text."""
        if not hidden:
            return self.encode(text, allow_special=True, continues=continues)
        ids: list[int] = []
        at = 0
        for match in [*self.markup.finditer(text), None]:
            plain = text[at : match.start() if match else len(text)]
            plain = SHIELD.sub(lambda shield: hidden.get(shield.group(), shield.group()), plain)
            ids += self.encode(plain, continues=continues and not ids)
            if match:
                ids += self.encode(match.group(), allow_special=True)
                at = match.end()
        return ids


def free_mark(contents: str) -> str:
    """What begins every shield of these contents: private-use characters that are not in them."""
    taken = set(_MARK.findall(contents))
    return next(f"\ue000{number}:" for number in count() if str(number) not in taken)
