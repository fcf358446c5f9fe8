"""The dashboard in a browser, in front of a simulated machine that does the demo's work: what is where, and what keys and clicks do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from attnix.syscalls import aconnect
from attnix.userland.demo.story import AGENTS
from attnix.userland.demo.work import work_shared

from ..gateway.rig import DEADLINE_S, Daemon, Served
from . import browser as b
from .browser import text, until

pytestmark = pytest.mark.e2e
AGENTS_SEEN: Final = AGENTS[:5]


class Work:
    """The demo's work, done; its contexts stay until `end`."""

    def __init__(self, socket: str) -> None:
        self._done, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._do(socket)))
        self._thread.start()
        assert self._done.wait(DEADLINE_S)

    async def _do(self, socket: str) -> None:
        async with aconnect(socket, name="demo") as system:
            await work_shared(system, AGENTS_SEEN, False, lambda index, text: None)
            self._done.set()
            await asyncio.to_thread(self._leave.wait)

    def end(self) -> None:
        self._leave.set()
        self._thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    started = Served(Daemon(tmp_path_factory.mktemp("dashboard"), frames=400))
    work = Work(started.daemon.socket)
    yield started
    work.end()
    started.stop()
    started.daemon.at_rest()
    assert started.daemon.process.stop() == 0


@pytest.fixture
def page(chrome: Chrome, served: Served) -> Chrome:
    """It has drawn what there is."""
    chrome.get(served.url + "/")
    until(chrome, lambda: len(chrome.find_elements(By.CSS_SELECTOR, "#process-rows tr")) >= len(AGENTS_SEEN))
    until(chrome, lambda: text(chrome, "#live-text") == "live")
    return chrome


def shows(chrome: Chrome, words: str) -> bool:
    return words in text(chrome, "#legend")


def press(chrome: Chrome, *keys: str) -> None:
    for key in keys:
        chrome.switch_to.active_element.send_keys(key)


def focused(chrome: Chrome, script: str) -> Any:
    return chrome.execute_script(f"const e = document.activeElement; return {script}")


def test_forks_stand_under_what_they_were_forked_from(page: Chrome) -> None:
    under = page.find_elements(By.CSS_SELECTOR, "#tree > ul > li > ul > li")
    assert len(under) == len(AGENTS_SEEN)


def test_it_fits_a_laptop_and_asks_nobody_else(page: Chrome, served: Served) -> None:
    width, height = b.LAPTOP
    size = page.execute_script(
        "const d = document.documentElement; return [d.scrollWidth, d.scrollHeight, innerWidth, innerHeight]"
    )
    assert size == [width, height, width, height]
    for selector in ("#tiles", "#memory", "#processes", "#lower", "#legend", "canvas"):
        box = page.find_element(By.CSS_SELECTOR, selector).rect
        assert box["x"] >= 0 and box["y"] >= 0 and box["width"] > 100 and box["height"] > 20, selector
        assert box["x"] + box["width"] <= width and box["y"] + box["height"] <= height, selector
    asked = set()
    for entry in page.get_log("performance"):  # type: ignore[no-untyped-call]
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.add(message["params"]["request"]["url"])
    asked = {url for url in asked if not url.startswith(("chrome", "data:"))}  # the browser's own first page
    assert len(asked) >= 10 and all(url.startswith(served.url) for url in asked), asked
    assert [
        entry
        for entry in page.get_log("browser")  # type: ignore[no-untyped-call]
        if entry["level"] == "SEVERE"
    ] == []
    wide = """
        const rows = document.querySelector("#process-rows"), table = rows.closest("table");
        for (const state of rows.querySelectorAll(".state")) state.textContent = "search_the_documents 120 s";
        return [table.scrollWidth, table.parentElement.clientWidth]
    """
    needed, there = page.execute_script(wide)
    assert needed <= there, "a tool of a long name hides what each was doing"


def test_a_click_on_a_block_explains_it_and_escape_ends_that(page: Chrome) -> None:
    canvas = page.find_element(By.CSS_SELECTOR, "canvas")
    page.execute_script(  # the first cell, which the shared prompt has
        "const c = arguments[0], r = c.getBoundingClientRect();"
        "c.dispatchEvent(new MouseEvent('click', {bubbles: true, clientX: r.left + 4, clientY: r.top + 4}))",
        canvas,
    )
    until(page, lambda: page.find_element(By.ID, "explain").is_displayed())
    assert text(page, "#lower-title").startswith("hbm0 frame 0: block ")
    said = text(page, "#explain")
    assert f"{len(AGENTS_SEEN) + 1} contexts" in said and "computed" in said
    assert not page.find_element(By.ID, "tree").is_displayed()
    press(page, Keys.ESCAPE)
    until(page, lambda: page.find_element(By.ID, "tree").is_displayed())
    assert text(page, "#lower-title") == "Fork tree"


def test_everything_can_be_reached_and_done_with_the_keyboard(page: Chrome) -> None:
    reached: list[str] = []
    for _ in range(40):
        press(page, Keys.TAB)
        reached.append(
            str(focused(page, "e.tagName + (e.dataset.pid ? ' pid' : '') + (e.className === 'skip' ? ' skip' : '')"))
        )
        line = focused(page, "getComputedStyle(e.type === 'radio' ? e.nextElementSibling : e).outlineStyle")
        assert line != "none", f"{reached[-1]} does not show that it has the focus"
        if reached[-1] == "TR pid":
            break
    assert reached[0] == "A skip" and reached[-1] == "TR pid"
    assert {"INPUT", "CANVAS", "BUTTON"} <= set(reached)
    press(page, Keys.ENTER)  # the process is chosen
    assert page.find_elements(By.CSS_SELECTOR, "tr[aria-selected=true]")
    press(page, Keys.ESCAPE)
    assert not page.find_elements(By.CSS_SELECTOR, "tr[aria-selected=true]")
    page.execute_script("document.querySelector('canvas').focus()")
    assert text(page, "#under").startswith("hbm0 frame 0")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert text(page, "#under").startswith("hbm0 frame 1:")
    press(page, Keys.ARROW_DOWN)
    assert not text(page, "#under").startswith("hbm0 frame 1:")
    press(page, Keys.END)
    assert text(page, "#under") == "hbm0 frame 399: free"
    press(page, Keys.HOME, Keys.ENTER)
    until(page, lambda: page.find_element(By.ID, "explain").is_displayed())
    press(page, Keys.ESCAPE)
    assert focused(page, "e.tagName") == "CANVAS"
    assert page.find_element(By.ID, "tree").is_displayed()


def test_colours_by_sharing_and_age_and_by_the_time_of_day(page: Chrome) -> None:
    legend = text(page, "#legend")
    for mode, words in (("sharing", "5–8"), ("age", "1–10 min"), ("process", "demo")):
        page.find_element(By.CSS_SELECTOR, f"input[value={mode}]").send_keys(Keys.SPACE)
        until(page, partial(shows, page, words))
    assert text(page, "#legend") == legend
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(ground)
    b.scheme(page, dark=True)
    dark = page.execute_script(ground)
    b.scheme(page, dark=False)
    assert (light, dark) == ("rgb(238, 241, 245)", "rgb(16, 21, 28)")


def test_the_page_says_when_nobody_answers(chrome: Chrome, tmp_path: Path) -> None:
    served = Served(Daemon(tmp_path, frames=32))
    try:
        chrome.get(served.url + "/")
        until(chrome, lambda: text(chrome, "#live-text") == "live")
        served.daemon.process.stop()
        until(chrome, lambda: text(chrome, "#live-text").startswith("not answering"))
    finally:
        served.stop()
        served.daemon.process.stop()
