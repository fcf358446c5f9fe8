"""`python -m attnix.drivers.nvme`: the driver process of a file tier.  The daemon starts it."""

from __future__ import annotations

import sys

from ..serve import run_driver
from .driver import make_backend

if __name__ == "__main__":
    run_driver("attnix.drivers.nvme", make_backend, sys.argv[1:])
