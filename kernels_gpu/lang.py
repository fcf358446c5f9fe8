"""triton and its language, or what stands for them where triton is not installed.

Every file with a kernel says `from .lang import tl, triton`.  Without triton the file still imports, and calling its
kernel raises RuntimeError.  Such files have no `from __future__ import annotations`: triton reads the annotations.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["MISSING", "Absent", "is_interpreted", "tl", "triton"]

MISSING = "triton is not installed: the GPU kernels need it (`pip install 'triton>=3.6'`; torch's CUDA wheels bring it)"


class Absent:
    """Stands for triton: names of it may be written down, decorators may be used, nothing can be called at run time."""

    def __getattr__(self, name: str) -> "Absent":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "Absent":
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(MISSING)


if TYPE_CHECKING:
    from . import _language as tl  # pyright: ignore[reportMissingModuleSource]  (types alone)

    triton: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        tl = triton = Absent()


def is_interpreted() -> bool:
    """Whether kernels run in triton's interpreter, on CPU tensors."""
    return not isinstance(triton, Absent) and bool(triton.knobs.runtime.interpret)


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter makes a loop's bound of an array of one element, which numpy 2.5 refuses and earlier ones warn of."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)  # which restores what was there before
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


if is_interpreted():
    _mend_interpreter()
