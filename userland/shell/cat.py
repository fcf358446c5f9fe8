"""`attnix cat`: the text of a context, and where its KV lies."""

from __future__ import annotations

import codecs
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, NamedTuple

import typer
from rich.text import Text

from attnix.syscalls.records import unpack_ids
from attnix.syscalls.types import PagemapResult, ReadResult

from ..errors import CommandError
from ..output import FromOption, JsonOption, SocketOption, cid_number, console, look_at, print_json, show
from ..visible import visible
from .blocks import Block, blocks_of

RESIDENT, DEMOTED, ABSENT = "resident", "demoted", "absent"
STYLES: Final = {RESIDENT: "green", DEMOTED: "blue", ABSENT: "red"}
SHARED_STYLE: Final = "underline"
_LEGEND: Final = (
    (f"{RESIDENT} (in hbm)", STYLES[RESIDENT]), (f"{DEMOTED} (in a slower tier)", STYLES[DEMOTED]),
    (f"{ABSENT} (computed when it is wanted)", STYLES[ABSENT]), ("shared with other contexts", SHARED_STYLE),
)  # fmt: skip


class Part(NamedTuple):
    """The text of one block.  A character belongs to the block that completes it."""

    block: Block
    where: str
    shared: bool
    text: str


def cat(
    cid: Annotated[
        int, typer.Argument(metavar="CTX", help="The context's cid, as `attnix lsctx` shows it.", parser=cid_number)
    ],
    tokens: Annotated[bool, typer.Option("--tokens", help="Token ids instead of text, a line per block.")] = False,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Print the text of a context: on a terminal with the parts of it that are in hbm, in a slower tier or in none coloured, and
    what it shares with others underlined; into a pipe the text alone.

    Control tokens of the chat template stand for no text.  Control characters are shown, not sent: --json has the text as it is.
    """
    with look_at(socket, "cat", source) as system:
        log, page_table = system.read(0, cid), system.pagemap(0, cid)
        devices = [row.device for row in system.tiers().tiers]
    if not tokens and not log.ends and log.tokens:
        raise CommandError("this model has no tokenizer, so its tokens have no text: --tokens prints their ids")
    parts = list(parts_of(log, page_table, devices))
    if as_json:
        print_json({"cid": cid, "tokens": unpack_ids(log.tokens), "parts": [_plain(part) for part in parts]})
    elif tokens:
        ids = unpack_ids(log.tokens)
        for part in parts:
            show(" ".join(map(str, ids[part.block.start : part.block.start + part.block.tokens])))
    elif sys.stdout.isatty():
        to = console()
        show(coloured(parts), to)
        show(legend(colours=to.color_system is not None and not to.no_color), to)
    else:
        sys.stdout.write(visible("".join(part.text for part in parts)))
        sys.stdout.flush()


def parts_of(log: ReadResult, page_table: PagemapResult, devices: Sequence[str]) -> Iterator[Part]:
    """Block for block.  The two were asked for one after the other: what came in between stands in the last part."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    ends = array("i", log.ends)
    blocks = blocks_of(page_table)
    length = len(log.tokens) // 4
    own = 1 << devices.index(page_table.device) if page_table.device in devices else 0
    at = 0
    for block in blocks:
        last = block is blocks[-1]
        stop = length if last else min(length, block.start + block.tokens)
        end = ends[stop - 1] if ends and stop else 0
        here = block.frame >= 0 or block.copies & own  # others may keep it in hbm where this one has let it go
        where = RESIDENT if here else DEMOTED if block.copies else ABSENT
        yield Part(block, where, block.sharers > 1, decode(log.text[at:end], last))
        at = max(at, end)


def coloured(parts: Sequence[Part]) -> Text:
    """For a terminal: what would steer it is shown, not done."""
    made = Text()
    for part in parts:
        made.append(visible(part.text), f"{STYLES[part.where]} {SHARED_STYLE}" if part.shared else STYLES[part.where])
    return made


def legend(*, colours: bool = True) -> Text:
    """colours: whether the terminal has any, and NO_COLOR is not set."""
    if not colours:
        return Text("without colours only `attnix pmap` tells what is where  ").append(*_LEGEND[-1])
    return Text("  ").join(Text(text, style) for text, style in _LEGEND)


def _plain(part: Part) -> dict[str, object]:
    return {
        "block": part.block.number, "tokens": part.block.tokens, "where": part.where, "shared": part.shared, "text": part.text,
    }  # fmt: skip
