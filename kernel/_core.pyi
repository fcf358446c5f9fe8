"""The extension module that `_core_build.py` makes.  Only `core.py` uses it; csrc/core.h has the signatures."""

from typing import Any

ffi: Any
lib: Any
