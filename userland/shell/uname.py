"""`attnix uname`: what runs here."""

from __future__ import annotations

from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show, table
from ..units import count, size


def uname(as_json: JsonOption = False, socket: SocketOption = "", source: FromOption = "") -> None:
    """Print versions, model, geometry, numerics and devices."""
    with look_at(socket, "uname", source) as system:
        seen = system.uname()
    if as_json:
        print_json(seen)
        return
    made = table("", "~")
    made.show_header = False
    for name, value in (
        ("system", f"{seen.system} {seen.version}, ABI {seen.abi_version}, pid {seen.pid}"),
        ("model", f"{seen.model} ({seen.architecture}, {seen.fingerprint})"),
        ("window", f"{count(seen.window_tokens)} tokens, vocabulary {count(seen.vocab_tokens)}"),
        ("frame", f"{seen.block_tokens} tokens, {size(seen.frame_bytes)} of {seen.kv_dtype}"),
        ("numerics", seen.numerics),
        ("devices", ", ".join(seen.devices)),
        ("tokenizer", seen.tokenizer or "none"),
    ):
        made.add_row(name, value)
    show(made)
