"""The text process: `python -m attnix.syscalls.textworker FD MODEL`, started by textservice.py and by nothing else.

Tokenizers and templates take milliseconds and run code that came with the model, so they have a process of their own:
the kernel's process keeps its one Python thread for the kernel (DESIGN.md §10, item 21).

Messages are framed as on the daemon's socket.

    from here, first    {"error"} or {"pieces", "special_ids", "stop_ids", "prefix_ids", "path", "has_template"}
    to here             [id, "text", text, context_tokens]
                        [id, "messages", [[role, content], ...], tail, context_tokens]
    from here           [id, 0, token ids as int32] or [id, errno, why]
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any, Final

import msgspec

from attnix.kernel.errors import E

from .framing import Splitter, header
from .records import pack_ids, unpack_ids
from .text import ChatMessage, TextModel, load_text

_RECEIVE_BYTES: Final = 1 << 18


def describe(model: TextModel) -> dict[str, Any]:
    """What the daemon wants to know of the tokenizer, so that it need not load it."""
    return {
        "pieces": model.token_bytes,
        "special_ids": sorted(model.special_ids),
        "stop_ids": list(model.stop_ids),
        "prefix_ids": list(model.prefix_ids),
        "path": str(model.path),
        "has_template": model.has_template,
    }


def work(model: TextModel, job: list[Any]) -> list[Any]:
    """Do one job.  What the caller or the template got wrong is EINVAL; anything else is EIO, and never an exception."""
    request, verb, *operands = job
    try:
        if verb == "text":
            ids = model.encode_text(*operands)
        else:
            messages, tail, context_tokens = operands
            ids = model.append_messages([ChatMessage(*m) for m in messages], unpack_ids(tail), context_tokens)
        return [request, 0, pack_ids(ids)]
    except ValueError as error:  # TemplateError is one
        return [request, int(E.EINVAL), str(error)]
    except Exception as error:
        return [request, int(E.EIO), f"the text worker failed: {type(error).__name__}: {error}"]


def main(fd: int, path: str) -> int:
    """Serve until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's; it closes the channel
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    with socket.socket(fileno=fd) as channel:

        def send(message: object) -> None:
            body = encode(message)
            channel.sendall(header(len(body)) + body)

        try:
            model = load_text(path)
        except (ValueError, OSError) as error:
            send({"error": str(error)})
            return 1
        send(describe(model))
        splitter = Splitter()
        while data := channel.recv(_RECEIVE_BYTES):
            for body in splitter.split(data):
                if isinstance(body, bytes):
                    send(work(model, decode(body)))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
