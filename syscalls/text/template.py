"""Chat templates: messages to prompt text, whole or only what a context still lacks.

Templates are Jinja programs that come with the model, so they run sandboxed.  They always render a whole conversation;
a context, however, grows: it holds the turns before, and the last reply as the tokens that were generated, without the
end-of-turn token that stopped it.  `after_reply` and `after_turns` cut what must be appended out of a whole rendering,
so that a second default system prompt or a second beginning-of-text never appears.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class TemplateError(ValueError):
    """The conversation cannot be rendered: the template refused it, failed, or cannot be extended in this way."""


class ChatMessage(NamedTuple):
    """One message; the same shape as `attnix.kernel.calls.Message`."""

    role: str
    content: str


# Stands for a reply while a conversation is rendered.  Letters only: templates strip white space and look for markup.
_REPLY: Final = "attnixReplyPlaceholderZqXj"


_CONTENT: Final = "attnixContentPlaceholderZqXj"  # the same, of another message


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks replies for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter: prompts are not web pages.  Arguments as transformers has them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template.

    source     Jinja text
    variables  what the template may name besides the messages (bos_token, eos_token)
    Error: TemplateError when it does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template does not compile: {error}") from error
        self._source = source
        self._variables = dict(variables)
        self._knows_developers = "developer" in source
        # Role, as the first message, as the last, as one of several of its role: seen in a rendering.
        self._shows: set[tuple[str, bool, bool, bool]] = set()

    @property
    def source(self) -> str:
        """Jinja text."""
        return self._source

    def render_with_tools(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        """The whole conversation, ready to be answered, of messages and tools as the template takes them.

        Error: TemplateError.
        """
        return self._render(list(messages), True, list(tools) or None)

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        """The whole conversation as text, ready to be answered when asked for.  Error: TemplateError."""
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return self._render(plain, add_generation_prompt, None)

    def _render(self, messages: list[Any], add_generation_prompt: bool, tools: list[Any] | None) -> str:
        known = [self._of_known_role(message) for message in messages]
        rendered = self._write(known, add_generation_prompt, tools)
        self._check_shown(known, add_generation_prompt, tools)
        return rendered

    def _of_known_role(self, message: Any) -> Any:
        """A developer speaks as the system where the template knows no developer, and would leave him out."""
        return message if self._knows_developers or message["role"] != "developer" else {**message, "role": "system"}

    def _check_shown(self, messages: list[Any], add_generation_prompt: bool, tools: list[Any] | None) -> None:
        """Error: TemplateError when the template leaves out what somebody says, as some do with a role that they do not know.

        What a reply says it may leave out: reasoning, or words beside tool calls.
        """
        roles = Counter(message["role"] for message in messages)
        for index, message in enumerate(messages):
            role = message["role"]
            place = (role, index == 0, index == len(messages) - 1, roles[role] > 1)
            if place in self._shows or role == "assistant" or not (message.get("content") or "").strip():
                continue
            marked = {**message, "content": _CONTENT}
            shown = self._shows_mark([*messages[:index], marked, *messages[index + 1 :]], add_generation_prompt, tools)
            if not shown and index == 0 and len(messages) > 1 and roles[role] == 1:
                # Mistral's show a system prompt with the last question only, and so nowhere when a tool has spoken last.
                shown = self._shows_mark([marked, {"role": "user", "content": "?"}], add_generation_prompt, tools)
            if not shown:
                where = (
                    "alone: append it with the next one"
                    if len(messages) == 1
                    else "behind others"
                    if index
                    else "first"
                )
                raise TemplateError(f"the model's chat template leaves out a message of {role!r} that comes {where}")
            self._shows.add(place)

    def _shows_mark(self, messages: list[Any], add_generation_prompt: bool, tools: list[Any] | None) -> bool:
        """Whether that content comes out.  What takes no other content than there was has looked at it."""
        try:
            return _CONTENT in self._write(messages, add_generation_prompt, tools)
        except TemplateError:
            return True

    def _write(self, messages: list[Any], add_generation_prompt: bool, tools: list[Any] | None) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._variables,
            )
        except Exception as error:  # a template is a program: it may divide by zero or index past an end
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error

    def after_reply(self, old: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> str:
        """What follows the content of old's last message, a reply: the end of its turn, then `new`.

        Error: TemplateError, also when the reply's content cannot be found again in the rendering.
        """
        stand_in = [*old[:-1], ChatMessage(old[-1].role, _REPLY)]
        whole = self.render([*stand_in, *new], awaits_reply(new))
        head, found, tail = whole.partition(_REPLY)
        if not found or _REPLY in tail or not head:
            raise TemplateError("this model's chat template does not show a reply once: pass the conversation as text")
        return tail

    def after_turns(self, old: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> str:
        """What follows the complete turns `old` to add `new`.

        Error: TemplateError, also when a longer conversation does not begin with the shorter one's rendering.
        """
        before = self.render(old, add_generation_prompt=False) if old else ""
        return self._rest(before, [*old, *new], new)

    def after_prompt(self, old: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> str:
        """What follows `old` and a generation prompt when the reply is given, as new[0], instead of generated.

        Error: as `after_turns`.
        """
        return self._rest(self.render(old, add_generation_prompt=True), [*old, *new], new)

    def _rest(self, before: str, conversation: Sequence[ChatMessage], new: Sequence[ChatMessage]) -> str:
        whole = self.render(conversation, awaits_reply(new))
        if not whole.startswith(before):
            raise TemplateError(
                "this model's chat template does not render a longer conversation as a continuation of the shorter "
                "one; append these messages together with the ones before"
            )
        return whole[len(before) :]


def awaits_reply(messages: Sequence[ChatMessage]) -> bool:
    """Whether the model is to speak next: after a user or a tool has spoken, not after a system prompt or a reply."""
    return bool(messages) and messages[-1].role not in ("system", "developer", "assistant")
