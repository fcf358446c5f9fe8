"""`attnix doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from attnix.syscalls import AttnixError
from attnix.syscalls.types import HealthArgs

from ..dumpfile import SavedSystem
from ..output import CommandError, FromOption, JsonOption, SocketOption, look_at, print_json, show
from .examine import DIAGNOSES, examine
from .facts import WINDOW_S, Facts, read
from .finding import Finding


class CannotLook(CommandError):
    """There is nothing to examine."""

    exit_status = 3


def doctor(
    window: Annotated[float, typer.Option(metavar="S", help="Look at the last so many seconds.", min=1)] = WINDOW_S,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Say what is wrong, with the numbers and the remedy, the worst first.

    A dump (--from) tells of prompts only when it was made with --text.  Exit status: 0 nothing is wrong, 1 something is, 3 it could not look.
    """
    try:
        with look_at(socket, "doctor", source) as system:
            facts = read(system, window)
            unseen = _unseen(facts, isinstance(system, SavedSystem) and not system.has("health", HealthArgs()))
    except (AttnixError, CommandError) as error:
        raise CannotLook(str(error)) from error
    found = examine(facts)
    if as_json:
        print_json(document(facts, found, unseen))
    else:
        for line in text(facts, found, unseen):
            show(line)
    if found:
        sys.exit(1)


def _unseen(facts: Facts, no_prompts: bool) -> list[str]:
    """What was not there to be looked at, as sentences: of it nobody can say that nothing is wrong."""
    said = []
    if no_prompts:
        said.append("this dump does not tell what prompts began with: it was made without `attnix dump --text`")
    if not facts.health.samples:
        said.append(
            "what the machine did in the last seconds is not told: others use it, too, and this is not the daemon's user (or it has "
            "just booted)"
        )
    return said


def document(facts: Facts, found: list[Finding], unseen: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "healthy": not found,
        "window_s": facts.window_ns / 1e9,
        "prompts": len(facts.heads),
        "findings": [asdict(finding) for finding in found],
        "unseen": list(unseen),
    }


def text(facts: Facts, found: list[Finding], unseen: Sequence[str] = ()) -> list[str]:
    looked = f"{facts.window_ns / 1e9:.0f} s, {len(facts.heads)} prompts, {facts.capacity_frames:,} frames of {facts.block_tokens} tokens"
    if not found:
        return [f"nothing is wrong that {len(DIAGNOSES)} diagnoses know of ({looked})", *_not_seen(unseen)]
    lines = [f"{len(found)} finding{'s' if len(found) > 1 else ''}, the worst first ({looked})"]
    for number, finding in enumerate(found, 1):
        cost = (
            f"costs {percent(finding.damage)} of the {finding.costs}"
            if finding.costs
            else "nobody can say what it costs"
        )
        lines += ["", f"{number}. {finding.title}", f"   {cost}"]
        lines += [f"   {line}" for line in finding.evidence]
        lines += [f"   -> {line}" for line in finding.remedies]
    return lines + [line for each in _not_seen(unseen) for line in ("", each)]


def _not_seen(unseen: Sequence[str]) -> list[str]:
    return [f"not looked at: {each}" for each in unseen]


def percent(share: float) -> str:
    return f"about {share:.0%}" if share >= 0.01 else "less than 1%"
