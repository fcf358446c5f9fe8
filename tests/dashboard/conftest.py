"""One browser for each file of tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome

from . import browser as b


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Where there is no chromium the test is skipped, or fails if ATTNIX_CHROMIUM says `required`: not every machine may install it."""
    if b.missing():
        if os.environ.get("ATTNIX_CHROMIUM") == "required":
            pytest.fail(f"{b.missing()}: `make test` installs it where it may")
        pytest.skip(b.missing())
    profile = tmp_path_factory.mktemp("chromium")
    with b.browser(profile) as driver:
        yield driver
    shutil.rmtree(profile, ignore_errors=True)
