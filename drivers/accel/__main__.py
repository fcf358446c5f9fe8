"""`python -m attnix.drivers.accel --channel FD --arena FD --rows FD --config JSON`: the accel driver's process."""

from __future__ import annotations

import sys

from ..serve import run_driver
from .driver import make_backend

if __name__ == "__main__":
    run_driver("attnix.drivers.accel", make_backend, sys.argv[1:])
