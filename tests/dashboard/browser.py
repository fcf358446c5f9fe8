"""Debian's chromium without a screen, and a way to ask it things."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from ..gateway.rig import DEADLINE_S

LAPTOP: Final = (1366, 768)
_FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip


def missing() -> str:
    """What keeps the browser from running; "": nothing."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not there (Debian: chromium, chromium-driver)"
    return ""


@contextmanager
def browser(directory: Path, dark: bool = False) -> Iterator[webdriver.Chrome]:
    """A window of a small laptop with nothing of any other window in it."""
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*_FLAGS, f"--user-data-dir={directory}", f"--window-size={LAPTOP[0]},{LAPTOP[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    os.environ.setdefault("SE_OFFLINE", "true")  # selenium looks for no driver elsewhere
    os.environ.setdefault("SE_AVOID_STATS", "true")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver") or ""))
    try:
        tell(
            driver,
            "Emulation.setDeviceMetricsOverride",
            width=LAPTOP[0],
            height=LAPTOP[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme(driver, dark)
        yield driver
    finally:
        driver.quit()


def scheme(driver: webdriver.Chrome, dark: bool) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    tell(driver, "Emulation.setEmulatedMedia", features=features)


def tell(driver: webdriver.Chrome, command: str, **arguments: Any) -> Any:
    """A command of the DevTools protocol."""
    return driver.execute_cdp_cmd(command, arguments)


def until(driver: webdriver.Chrome, holds: Callable[[], Any], seconds: float = DEADLINE_S) -> None:
    WebDriverWait(driver, seconds, 0.1).until(lambda _: holds())


def text(driver: webdriver.Chrome, selector: str) -> str:
    """What the first such element shows."""
    return each(driver, selector, "innerText")[0].strip()


def each(driver: webdriver.Chrome, selector: str, property: str) -> list[str]:
    """A property of every such element, of one moment: an element that was found may be gone when it is asked."""
    found: list[str] = driver.execute_script(
        f"return [...document.querySelectorAll(arguments[0])].map((element) => element.{property})", selector
    )
    return found
