"""triton.language for the type checkers: names exist, `constexpr` is a type, the rest is triton's own business."""

from typing import Any

class constexpr(Any):
    def __init__(self, value: Any) -> None: ...

def __getattr__(name: str) -> Any: ...
