"""How the demo looks: text that reads in a log, and moves on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from attnix.syscalls import connect

from ..output import show
from ..shell.pmap import collect, print_frame_map
from ..shell.ps import process_table
from ..units import count
from .story import MAX_TOKENS, Agent
from .work import Killed, Watch, Work

_NAME_COLUMNS: Final = 11


class Page:
    """Prints the demo, step by step."""

    def __init__(self, console: Console) -> None:
        self.console: Final = console

    def step(self, title: str) -> None:
        """A heading."""
        show("", self.console)
        show(Text(f"== {title}", "bold"), self.console)

    def line(self, text: str, style: str = "") -> None:
        """A line under it."""
        show(Text(text, style), self.console)

    @contextmanager
    def streams(self, agents: Sequence[Agent]) -> Iterator[Watch]:
        """While agents generate: their text as it comes, on a terminal; nothing elsewhere."""
        said = [""] * len(agents)

        def picture() -> Text:
            room = self.console.width - _NAME_COLUMNS - 1
            lines = [
                Text(f"{a.name:<{_NAME_COLUMNS}}").append(tail(s, room)) for a, s in zip(agents, said, strict=True)
            ]
            return Text("\n").join(lines)

        live = Live(console=self.console, transient=True) if self.console.is_terminal else None

        def watch(index: int, text: str) -> None:
            said[index] += text
            if live is not None:
                live.update(picture())

        with live or nullcontext():
            yield watch

    def killed(self, seen: Killed | None) -> None:
        """What the death of the driver did to the streams."""
        if seen is None:
            self.line("the driver was not killed: a stream ended before all had begun", "yellow")
            return
        self.line(
            f"kill -9 {seen.driver_pid}: the accel driver, with {seen.streams} streams in flight and "
            f"{seen.tokens_so_far} tokens out",
            "red",
        )
        self.line(f"driver {seen.next_pid} took over; {seen.silence_s:.1f} s without a token, and every stream went on")

    def answers(self, agents: Sequence[Agent], work: Work) -> None:
        """What they said."""
        for agent, answer in zip(agents, work.answers, strict=True):
            self.line(f"{agent.name:<{_NAME_COLUMNS}}{agent.question}", "cyan")
            text = " ".join(answer.text.split()) + (" ..." if answer.reason == "length" else "")
            for line in Text(text).wrap(self.console, min(self.console.width, 96) - _NAME_COLUMNS):
                self.line(" " * _NAME_COLUMNS + line.plain)

    def inspect(self, socket: str) -> None:
        """`ps` and the frame map, asked by a connection of its own."""
        with connect(socket, name="attnix demo") as system:
            processes = system.ps().processes
            others = tuple(row for row in processes if row.pid != system.server.pid)
            mapped = collect(system, others)
            tiers = system.tiers().tiers
        self.step("attnix ps")
        show(process_table(others, contexts=False), self.console)
        self.step("attnix pmap")
        for tier in tiers:
            print_frame_map(self.console, tier, mapped)

    def comparison(self, shared: Work, stateless: Work) -> None:
        """The one line, as wide as it may be."""
        self.line(
            f"shared {shared.seconds:.1f} s, {count(shared.computed_tokens)} tokens, {shared.mapped_frames} frames; "
            f"stateless {stateless.seconds:.1f} s, {count(stateless.computed_tokens)} tokens, "
            f"{stateless.mapped_frames} frames ({stateless.seconds / shared.seconds:.1f}x the time)",
            "bold green",
        )

    def verdict(self, different: Sequence[str], numerics: str) -> None:
        """Did all runs say the same?"""
        if not different:
            self.line(f"the answers of all three runs are the same, token for token (up to {MAX_TOKENS} each)", "green")
        elif numerics == "fast":
            self.line(f"fast numerics: {len(different)} answers differ between runs ({', '.join(different)})", "yellow")
        else:
            self.line(f"NOT THE SAME: {', '.join(different)}; with invariant numerics this is a bug", "bold red")


def tail(text: str, room: int) -> str:
    """The end of a text, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= room else "…" + flat[len(flat) - room + 1 :]
