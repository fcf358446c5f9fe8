"""`make shots`: the pictures in README, taken of the real model doing the same work each time.

    python -m tests.dashboard.take_shots [DIRECTORY]        docs/shots unless told otherwise

Numbers differ from machine to machine; what is shown does not: agents forked off one prompt, two of them waiting for tools,
readers of long texts, and an hbm that is too small for all of them.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from attnix.syscalls import connect
from attnix.userland.shell.top_app import TopApp

from ..gateway.rig import Process
from . import browser as b

ROOT: Final = Path(__file__).resolve().parents[2]
CLI: Final = [sys.executable, "-m", "attnix.userland.cli"]
WATCHED_S: Final = 45  # so that rates and timelines have something to show
TOP_LOOKS: Final = 24
TOP_BUSY: Final = 5  # processes with tokens in the look that is shown
FIRST_BLOCK: Final = """const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new MouseEvent("click", {bubbles: true, clientX: box.left + 4, clientY: box.top + 4}));"""
TOP_SIZE: Final = (118, 34)  # columns and rows


def main(directory: Path) -> int:
    if b.missing():
        print(f"no pictures: {b.missing()}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="attnix-shots-") as name:
        folder = Path(name)
        socket = str(folder / "run" / "attnix.sock")
        (folder / "run").mkdir(mode=0o700)
        boot = [
            *CLI, "boot", "--daemon", "--socket", socket, "--state-dir", str(folder / "state"), "--hbm", "48MiB", "--dram", "96MiB",
            "--nvme", f"192MiB@{folder / 'nvme'}",
        ]  # fmt: skip
        subprocess.run(boot, check=True)
        work = Process([sys.executable, "-m", "tests.dashboard.work", socket])
        gateway = Process([*CLI, "serve", "--socket", socket, "--port", "0"])
        try:
            with b.browser(folder / "chromium") as chrome:
                dashboard(chrome, gateway.said.rpartition(" ")[2], directory)
                top(socket, chrome, folder, directory)
        finally:
            gateway.stop()
            work.stop()
            subprocess.run([*CLI, "shutdown", "--socket", socket], check=True)
    return 0


def dashboard(chrome: Chrome, url: str, directory: Path) -> None:
    """By process in daylight; and at night by sharing, with a block explained."""
    chrome.get(url)
    WebDriverWait(chrome, 60).until(lambda _: chrome.find_elements(By.CSS_SELECTOR, "#process-rows tr"))
    time.sleep(WATCHED_S)
    chrome.save_screenshot(str(directory / "dashboard.png"))
    b.scheme(chrome, dark=True)
    chrome.find_element(By.CSS_SELECTOR, "input[value=sharing]").send_keys(" ")
    chrome.execute_script(FIRST_BLOCK)
    WebDriverWait(chrome, 60).until(lambda _: chrome.find_element(By.ID, "explain").is_displayed())
    time.sleep(2)
    chrome.save_screenshot(str(directory / "dashboard-dark.png"))


def top(socket: str, chrome: Chrome, folder: Path, directory: Path) -> None:
    """`attnix top` as textual draws it, and that as the browser does."""

    async def watched() -> str:
        with connect(socket, name="attnix top") as system:
            app = TopApp(system, 1.0, "tokens_s")
            async with app.run_test(size=TOP_SIZE) as pilot:
                for _ in range(TOP_LOOKS):
                    await pilot.pause(1.0)
                while app.seen is not None and sum(n > 0 for n in app.seen.tokens_s.values()) < TOP_BUSY:
                    await pilot.pause(1.0)  # the machine was busy elsewhere in that second
                return app.export_screenshot(title="attnix top")

    svg = re.sub(r"@font-face\s*\{[^}]*\}", "", asyncio.run(watched()))  # they would be fetched from elsewhere
    svg = re.sub(r"font-family:[^;\"}]*Fira Code[^;\"}]*", 'font-family: "DejaVu Sans Mono", monospace', svg)
    page = folder / "top.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><style>body{{margin:0}}svg{{width:1180px;height:auto}}</style>{svg}'
    )
    chrome.get(page.as_uri())
    chrome.find_element(By.TAG_NAME, "svg").screenshot(str(directory / "top.png"))


if __name__ == "__main__":
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "shots"
    into.mkdir(parents=True, exist_ok=True)
    status = main(into)
    for path in sorted(into.glob("*.png")) if not status else ():
        print(f"{path}: {path.stat().st_size // 1024} KiB")
    sys.exit(status)
