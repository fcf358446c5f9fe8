"""What `attnix bench attention` measures its kernels against: torch SDPA on contiguous KV, flex_attention on pages, FlashInfer.

Each is prepared with the KV that ours reads and gives a call without arguments.  Its answer is compared with ours before
anything is timed: who computes something else is no peer.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Protocol

import torch

from attnix.kernels_gpu.shapes import Frames, PageTable

FLEX_PAGE: Final = 128  # flex_attention's own default block; a page of ours may be smaller
Call = Callable[[], torch.Tensor]


class PeerMissing(Exception):
    """A peer cannot run here; the message says why."""


class Setting(NamedTuple):
    """One case, set up: B sequences of equal `context`, of which the last `new` tokens are queries.

    q       [B * new, Hq, D]
    frames  [F, 1, 2, Hkv, P, D]
    pages   [B, N]
    """

    q: torch.Tensor
    frames: Frames
    pages: PageTable
    batch: int
    context: int
    new: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [B, Hkv, context, D] of their own."""
        n = -(-self.context // self.frames.block_tokens)
        both = self.frames.kv[self.pages.frame[:, :n].long(), 0]  # [B, n, 2, Hkv, P, D]
        heads, dim = self.frames.kv_heads, self.frames.head_dim
        flat = both.permute(2, 0, 3, 1, 4, 5).reshape(2, self.batch, heads, -1, dim)[:, :, :, : self.context]
        return flat[0].contiguous(), flat[1].contiguous()

    def query(self) -> torch.Tensor:
        """[B, Hq, new, D]"""
        return self.q.view(self.batch, self.new, *self.q.shape[1:]).transpose(1, 2).contiguous()

    def rows(self, out: torch.Tensor) -> torch.Tensor:
        """[B, Hq, new, D] as ours is: [B * new, Hq, D]"""
        return out.transpose(1, 2).reshape(self.q.shape)


class Prepare(Protocol):
    def __call__(self, setting: Setting) -> Call: ...


def sdpa(setting: Setting) -> Call:
    """torch.nn.functional.scaled_dot_product_attention, whichever backend it picks.

    Decode sees everything; a prefill from the beginning is causal.
    """
    k, v = setting.contiguous()
    q, causal = setting.query(), setting.new > 1
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> torch.Tensor:
        return setting.rows(attend(q, k, v, is_causal=causal, scale=setting.scale, enable_gqa=True))

    return call


def flex(setting: Setting) -> Call:
    """flex_attention over torch's own PagedAttention, compiled where there is a device."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    k, v = setting.contiguous()
    q, device, offset = setting.query(), setting.q.device, setting.context - setting.new
    pages_each = -(-setting.context // FLEX_PAGE)
    total = pages_each * setting.batch * FLEX_PAGE
    paged = PagedAttention(total // FLEX_PAGE, FLEX_PAGE, setting.batch, device=str(device))
    length = torch.tensor(setting.context, device=device)
    for sequence in torch.arange(setting.batch, device=device):
        paged.reserve(sequence, length)
    shape = (1, setting.frames.kv_heads, total, setting.frames.head_dim)
    k_cache, v_cache = (
        torch.zeros(shape, dtype=k.dtype, device=device),
        torch.zeros(shape, dtype=v.dtype, device=device),
    )
    every = torch.arange(setting.batch, device=device)
    at = torch.arange(setting.context, device=device).expand(setting.batch, -1)
    paged.assign(every, at, k, v, k_cache, v_cache)

    def causal(b: Any, h: Any, q_index: Any, kv_index: Any) -> Any:
        return q_index + offset >= kv_index

    logical = create_block_mask(
        causal, setting.batch, None, setting.new, pages_each * FLEX_PAGE, device=str(device), BLOCK_SIZE=FLEX_PAGE
    )
    mask = paged.convert_logical_block_mask(logical)
    attend: Any = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention

    def call() -> torch.Tensor:
        return setting.rows(attend(q, k_cache, v_cache, block_mask=mask, scale=setting.scale, enable_gqa=True))

    return call


def flashinfer(setting: Setting) -> Call:
    """Its paged wrappers in the layout HND, which one layer of our frames is: it reads the very same memory."""
    try:
        library = importlib.import_module("flashinfer")
    except ImportError as error:
        raise PeerMissing("not installed") from error
    if setting.q.device.type != "cuda":
        raise PeerMissing("it needs a GPU")
    device, frames = setting.q.device, setting.frames
    n = -(-setting.context // frames.block_tokens)
    indptr = torch.arange(setting.batch + 1, dtype=torch.int32, device=device) * n
    indices = setting.pages.frame[:, :n].reshape(-1).contiguous()
    last = torch.full(
        (setting.batch,), setting.context - (n - 1) * frames.block_tokens, dtype=torch.int32, device=device
    )
    kv = frames.kv[:, 0]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    heads = (setting.q.shape[1], frames.kv_heads, frames.head_dim)
    dtypes = {"q_data_type": setting.q.dtype, "kv_data_type": kv.dtype}
    if setting.new == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(indptr, indices, last, *heads, frames.block_tokens, **dtypes)
    else:
        rows = torch.arange(setting.batch + 1, dtype=torch.int32, device=device) * setting.new
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(rows, indptr, indices, last, *heads, frames.block_tokens, causal=True, **dtypes)
    return lambda: wrapper.run(setting.q, kv)


PEERS: Final[dict[str, Prepare]] = {"torch SDPA": sdpa, "flex_attention": flex, "FlashInfer": flashinfer}


@contextlib.contextmanager
def prepared(name: str, setting: Setting, want: torch.Tensor, tolerance: float) -> Iterator[Call]:
    """The peer's call, compared with our answer.  Error: PeerMissing."""
    try:
        call = PEERS[name](setting)
        got = call()
    except PeerMissing:
        raise
    except Exception as error:  # whatever a foreign library says: it is missing from this case, and the rest goes on
        raise PeerMissing(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}") from error
    worst = float((got.float() - want.float()).abs().max())
    if not worst <= tolerance:
        raise PeerMissing(f"it computes something else: {worst:.3g} apart")
    yield call
