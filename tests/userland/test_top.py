"""`attnix top` driven key by key, through textual's own pilot, against a real daemon."""

from __future__ import annotations

from typing import Any

from textual.widgets import DataTable, Label, Sparkline, Static

from attnix.syscalls import connect
from attnix.userland.shell.top_app import TopApp

from .conftest import Serve

NEVER = 3600.0  # nothing is looked at by itself: the test says when


def names(app: TopApp) -> list[str]:
    processes: DataTable[Any] = app.query_one(DataTable)
    return [str(processes.get_row_at(index)[2]) for index in range(processes.row_count)]


def said(app: TopApp) -> str:
    return str(app.query_one("#said", Label).render())


async def test_it_shows_sorts_and_acts(serve: Serve) -> None:
    path = serve(script=list(b"answer" * 30))
    with connect(path, name="holder") as holder, connect(path, name="attnix top") as system:
        small, large = holder.spawn("small"), holder.spawn("large", nice=3)
        for process, tokens in ((small, 8), (large, 40)):
            context = process.alloc_context()
            context.append(tokens=range(tokens))
            context.forward(1)
        app = TopApp(system, NEVER, "pid")
        async with app.run_test(size=(120, 40)) as pilot:
            assert names(app) == ["holder", "small", "large"], "not itself"
            await pilot.press("n")
            assert names(app)[0] == "large" and app.sort_by == "tokens"
            await pilot.press("i", "down", "down")
            assert app.chosen() == large.pid
            context.append(tokens=range(6))
            context.forward(1)
            app.refresh_now()
            await pilot.pause()
            assert app.chosen() == large.pid, "the cursor stays with its process"
            assert list(app.query_one("#tokens", Sparkline).data or ())[-1] > 0
            assert "hbm0" in str(app.query_one("#summary", Static).render())
            with connect(
                path, name="again"
            ) as again:  # ten full blocks of `large` are found, its eleventh was not, nor are four more
                other = again.alloc_context()
                other.append(tokens=[*range(40), *range(100, 116)])
                other.forward(1)
                app.refresh_now()
                app.refresh_now()  # a look in which nobody looks for anything changes nothing
            assert str(app.query_one("#hits_hbm_label", Label).render()) == "hits in hbm 67%", "10 of 15"
            await pilot.press("plus")
            assert holder.ps(large.pid).processes[0].nice == 4 and f"pid {large.pid}: nice 4" in said(app)
            await pilot.press("minus", "minus")
            assert holder.ps(large.pid).processes[0].nice == 2
            await pilot.press("z")
            assert holder.ps(large.pid).processes[0].state == "stopped"
            await pilot.press("z")
            assert holder.ps(large.pid).processes[0].state == "ready"
            await pilot.press("x")
            assert large.wait().reason == "killed" and f"pid {large.pid} was ended" in said(app)
            app.refresh_now()
            assert names(app) == ["holder", "small"]
            holder.shutdown()
            app.refresh_now()
            assert any(words in said(app) for words in ("the daemon", "connection", "going down"))
            assert names(app) == ["holder", "small"], "what was seen last stays"
            with connect(serve(path=path), name="anew"):
                app.refresh_now()
                assert (names(app), said(app)) == (["anew"], ""), "the next daemon is found"
            await pilot.press("q")
        assert app.return_value is None


async def test_names_are_no_markup(serve: Serve) -> None:
    path = serve()
    with connect(path, name="a [/b] [red]c[/]"), connect(path, name="attnix top") as system:
        app = TopApp(system, NEVER, "pid")
        async with app.run_test(size=(80, 24)) as pilot:
            assert names(app) == ["a [/b] [red]c[/]"]
            assert [each.data for each in app.query(Sparkline)] == [(0.0, 0.0)] * 3, "nothing is drawn as nothing"
            await pilot.pause()
            keys: Any = app.query("FooterKey")
            shown = {key.description for key in keys if key.region.right <= 80}
            assert shown >= {"leave", "end", "stop/go on", "nicer", "less", "tok/s", "kv", "pss", "tokens"}
            await pilot.press("q")
