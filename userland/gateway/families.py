"""Which convention a model follows: its chat template shows it."""

from __future__ import annotations

from attnix.syscalls.text import TemplateError, TextModel

from .tools.generic import Generic
from .tools.hermes import Hermes
from .tools.llama3 import Llama3
from .tools.mistral import Mistral
from .tools.protocol import Family

__all__ = ["Family", "family_of"]


def family_of(model: TextModel) -> Family:
    """By what the template writes for tools; a template that knows none is `Generic`."""
    try:
        source = model.chat_template.source
    except TemplateError:
        return Generic()
    if "tools" not in source:
        return Generic()
    if "[TOOL_CALLS]" in source:
        return Mistral()
    if "<tool_call>" in source:
        return Hermes()
    if "<|start_header_id|>" in source:
        return Llama3()
    return Generic()
