"""The display of `attnix top`: sparklines, tiers and a table of processes, in textual."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Label, Sparkline, Static

from attnix.syscalls import AttnixError, Client, connect
from attnix.syscalls.exceptions import ConnectionLost, SyscallError

from ..output import PATIENCE_S, System
from ..visible import visible
from .top import COLUMNS, Seen, cells, hit_rates, look, ordered, summary

_KEPT: Final = 120  # looks in a sparkline
_HITS_OVER: Final = 10  # looks that a hit rate is of: in a single one there may be no prompt
_NOTHING: Final = (0.0, 0.0)  # of a single number the line is as high as it can be
_STOP, _CONT, _TERM = 19, 18, 15


class TopApp(App[None]):
    """system: a client of its own.  `refresh_now` is called every `interval` seconds, and by tests."""

    CSS = """
    #summary { height: auto; padding: 0 1; }
    #rates { height: 4; }
    .rate { width: 1fr; padding: 0 1; }
    Sparkline { height: 2; }
    #said { height: 1; padding: 0 1; color: $warning; }
    DataTable { height: 1fr; }
    """
    # As they stand in the last line, of which a narrow terminal shows the beginning.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "leave"), Binding("x", "end", "end"), Binding("z", "stop", "stop/go on"),
        Binding("plus,equals_sign", "renice(1)", "nicer"), Binding("minus", "renice(-1)", "less"),
        *(Binding(key, f"sort('{name}')", name.replace("tokens_s", "tok/s")) for key, name in (
            ("t", "tokens_s"), ("k", "kv"), ("p", "pss"), ("n", "tokens"), ("a", "age"), ("i", "pid"))),
    ]  # fmt: skip
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, system: System, interval: float, sort: str) -> None:
        super().__init__()
        self.title = "attnix top"
        self.sort_by = sort
        self.seen: Seen | None = None
        self._system = system
        self._lost = False
        self._interval = interval
        self._tiers = list(dict.fromkeys(row.tier for row in system.tiers().tiers))
        shown = ("tokens", *(f"hits_{tier}" for tier in self._tiers), "pressure")
        self._rates: dict[str, deque[float]] = {name: deque(_NOTHING, _KEPT) for name in shown}
        self._counters: deque[Mapping[str, int]] = deque(maxlen=_HITS_OVER + 1)

    def compose(self) -> ComposeResult:
        yield Static(id="summary", markup=False)
        with Horizontal(id="rates"):
            for name in self._rates:
                with Vertical(classes="rate"):
                    yield Label("", id=f"{name}_label", markup=False)
                    yield Sparkline(_NOTHING, id=name)
        yield Label("", id="said", markup=False)
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        processes: DataTable[Any] = self.query_one(DataTable)
        for column in COLUMNS:
            processes.add_column(column.lstrip(">"), key=column)
        processes.focus()
        self.refresh_now()
        self.set_interval(self._interval, self.refresh_now)

    def on_unmount(self) -> None:
        if isinstance(self._system, Client):  # which may be one of its own
            self._system.close()

    def refresh_now(self) -> None:
        """Look again.  A daemon that is gone is said to be, and what was seen last stays until there is another."""
        before = self.seen
        try:
            if self._lost:
                self._system = connect(self._system.path, name="attnix top", timeout=PATIENCE_S)
            self.seen = look(self._system, before)
        except AttnixError as error:
            self._lost = isinstance(self._system, Client) and isinstance(error, ConnectionLost)
            self._say(str(error))
            return
        if self._lost:
            self._lost = False
            self._say("")
        self._draw(before)

    def _draw(self, before: Seen | None) -> None:
        seen = self.seen
        assert seen is not None
        self.query_one("#summary", Static).update("\n".join(summary(seen)))
        self._counters.append(seen.sample.counters)
        if seen.rates is not None and before is not None:
            found = hit_rates(seen.sample.tiers, seen.sample.counters, self._counters[0])
            some = seen.rates.some / 10
            self._plot("tokens", seen.rates.comp, f"tokens/s {seen.rates.comp:,.0f}")
            for tier in self._tiers:
                share = found.get(tier, 0.0)
                self._plot(f"hits_{tier}", 100 * share, f"hits in {tier} {share:.0%}" if found else f"hits in {tier} -")
            self._plot("pressure", some, f"pressure {some:.1f}%")
        self._list(seen)

    def _plot(self, name: str, value: float, text: str) -> None:
        self._rates[name].append(value)
        self.query_one(f"#{name}_label", Label).update(text)
        self.query_one(f"#{name}", Sparkline).data = list(self._rates[name])

    def _list(self, seen: Seen) -> None:
        processes: DataTable[Any] = self.query_one(DataTable)
        chosen = self.chosen()
        processes.clear()
        for row in ordered(seen, self.sort_by):
            # Names are anybody's: what is no Text would be taken as markup.
            processes.add_row(*(Text(visible(cell)) for cell in cells(row, seen)), key=str(row.pid))
        if chosen and any(row.pid == chosen for row in seen.processes):
            processes.move_cursor(row=processes.get_row_index(str(chosen)))

    def chosen(self) -> int:
        """The pid under the cursor, 0 when there is none."""
        processes: DataTable[Any] = self.query_one(DataTable)
        if not processes.row_count:
            return 0
        key = processes.coordinate_to_cell_key(processes.cursor_coordinate).row_key.value
        return int(key or 0)

    def _say(self, text: str) -> None:
        self.query_one("#said", Label).update(visible(text))

    # -- keys ---------------------------------------------------------------------------------------------------------

    def action_sort(self, by: str) -> None:
        self.sort_by = by
        self._say(f"sorted by {by}")
        if self.seen is not None:
            self._list(self.seen)

    def action_end(self) -> None:
        self._signal(_TERM, "was ended")

    def action_stop(self) -> None:
        stopped = self._state() == "stopped"
        self._signal(_CONT if stopped else _STOP, "goes on" if stopped else "is stopped: z lets it go on")

    def action_renice(self, by: int) -> None:
        pid, row = self.chosen(), self._row()
        if row is None:
            return
        nice = max(-20, min(19, row.nice + by))
        try:
            self._system.setpriority(pid, nice)
        except SyscallError as error:
            self._say(str(error))
            return
        self._say(f"pid {pid}: nice {nice}")
        self.refresh_now()

    def _signal(self, number: int, done: str) -> None:
        pid = self.chosen()
        if not pid:
            return
        try:
            self._system.kill(pid, number)
        except SyscallError as error:
            self._say(str(error))
            return
        self._say(f"pid {pid} {done}")
        self.refresh_now()

    def _row(self) -> Any:
        pid = self.chosen()
        return next((row for row in self.seen.processes if row.pid == pid), None) if self.seen and pid else None

    def _state(self) -> str:
        row = self._row()
        return "" if row is None else str(row.state)
