"""Text that somebody else made, as it can be printed: what would steer a terminal is shown, not done.

A dump, a driver's last words, an answer of the model and a document behind an error may hold anything.  An escape sequence
rewrites what stands above it, or answers for whoever looks; so does one that `| less` or `tail -f FILE` prints later, so pipes
are no exception.  The exact text is in `--json`, in JSON's own escapes.
"""

from __future__ import annotations

import re
from typing import Final

# C0 but for tab and line feed, DEL, C1, surrogates (no UTF-8 has them), the separators that count as ends of lines, and
# what turns the direction of writing around (https://trojansource.codes).
_STEERING: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_DEL: Final = "\x7f"


def visible(text: str) -> str:
    """C0 and DEL as their pictures (U+2400 and on), the rest as U+FFFD."""
    return _STEERING.sub(lambda found: _picture(found.group()), text)


def in_json(document: str) -> str:
    """Those that JSON leaves as they are, as its escapes.  They stand inside strings only."""
    return _STEERING.sub(lambda found: f"\\u{ord(found.group()):04x}", document)


def _picture(char: str) -> str:
    return "\u2421" if char == _DEL else chr(0x2400 + ord(char)) if char < " " else "\ufffd"
