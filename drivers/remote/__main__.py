"""`python -m attnix.drivers.remote --channel FD --arena FD --rows FD --config JSON`: the network tier's process."""

from __future__ import annotations

from .driver import main

if __name__ == "__main__":
    main()
