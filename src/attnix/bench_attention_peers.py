"""What `attnix bench attention` measures its kernels against: torch SDPA on contiguous KV, flex_attention on pages, FlashInfer.

Each is prepared with the KV that ours reads and gives a call without arguments.  First our answer is compared with SDPA's, of
one sequence at a time, which always fits: a wrong answer has no speed.  Then each peer's with ours, before anything is timed:
who computes something else is no peer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from attnix.kernels_gpu.shapes import Frames, PageTable

FLEX_PAGE: Final = 128  # flex_attention's own default block; a page of ours may be smaller
# Between two answers, of one row and head, as a share of its length.  bf16 has 8 bits: weights and outputs that are rounded
# once each are 0.002 apart, and random values over n keys have a length of sqrt(n): 0.005 each at 128k, whatever their own.
TOLERANCE: Final = 0.02
COMPARED_ROWS: Final = 4096  # at a time, in float32
Call = Callable[[], torch.Tensor]


class PeerMissing(Exception):
    """A peer cannot run here; the message says why."""


class Wrong(Exception):
    """Our own answer is not SDPA's; the message says where."""


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

    def in_order(self) -> Setting:
        """The same frames, each sequence's one after the other."""
        frame = torch.arange(self.pages.frame.numel(), dtype=torch.int32, device=self.q.device)
        return self._replace(pages=PageTable(frame.view_as(self.pages.frame), self.pages.shift, self.pages.count))

    def contiguous(self, sequences: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these as [n, Hkv, context, D] of their own; needs no memory but that and one sequence's more."""
        shape = (len(sequences), self.frames.kv_heads, self.context, self.frames.head_dim)
        made = torch.empty((2, *shape), dtype=self.frames.kv.dtype, device=self.q.device)
        n = -(-self.context // self.frames.block_tokens)
        for to, sequence in enumerate(sequences):
            both = self.frames.kv[self.pages.frame[sequence, :n].long(), 0]  # [n, 2, Hkv, P, D]
            flat = both.permute(1, 2, 0, 3, 4).reshape(2, shape[1], -1, shape[3])
            made[:, to] = flat[:, :, : self.context]
        return made[0], made[1]

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
    k, v = setting.contiguous(range(setting.batch))
    q, causal = setting.query(), setting.new > 1
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> torch.Tensor:
        return setting.rows(attend(q, k, v, is_causal=causal, scale=setting.scale, enable_gqa=True))

    return call


def flex(setting: Setting) -> Call:
    """flex_attention over torch's own PagedAttention, compiled where there is a device."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dtype = setting.frames.kv.dtype
    q, device, offset = setting.query(), setting.q.device, setting.context - setting.new
    pages_each = -(-setting.context // FLEX_PAGE)
    total = pages_each * setting.batch * FLEX_PAGE
    paged = PagedAttention(total // FLEX_PAGE, FLEX_PAGE, setting.batch, device=str(device))
    length = torch.tensor(setting.context, device=device)
    for sequence in torch.arange(setting.batch, device=device):
        paged.reserve(sequence, length)
    shape = (1, setting.frames.kv_heads, total, setting.frames.head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    at = torch.arange(setting.context, device=device)[None]
    for sequence in range(setting.batch):
        k, v = setting.contiguous([sequence])
        paged.assign(torch.tensor([sequence], device=device), at, k, v, k_cache, v_cache)

    def causal(b: Any, h: Any, q_index: Any, kv_index: Any) -> Any:
        return q_index + offset >= kv_index

    logical = create_block_mask(
        causal, setting.batch, None, setting.new, pages_each * FLEX_PAGE, device=str(device), BLOCK_SIZE=FLEX_PAGE
    )
    mask = paged.convert_logical_block_mask(logical)
    attend: Any = compiled(flex_attention) if device.type == "cuda" else flex_attention

    def call() -> torch.Tensor:
        return setting.rows(attend(q, k_cache, v_cache, block_mask=mask, scale=setting.scale, enable_gqa=True))

    return call


def compiled(function: Callable[..., Any], **how: Any) -> Any:
    """torch.compile for the shapes of one case.  torch counts compilations per function and gives up at the ninth: the cases
    before are forgotten here."""
    dynamo: Any = importlib.import_module("torch._dynamo")  # untyped
    dynamo.reset()
    return torch.compile(function, dynamic=False, **how)


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


def own_bytes(name: str, setting: Setting) -> int:
    """What a peer takes beside the KV that ours reads, at most."""
    kv, q = setting.frames.kv.numel() * setting.frames.kv.element_size(), setting.q.numel() * setting.q.element_size()
    if name == "torch SDPA":
        return kv + 2 * kv // setting.batch + 3 * q
    if name == "flex_attention":  # one sequence's copy, twice, on its way; and the mask, before it is one of blocks
        return kv + 3 * kv // setting.batch + 3 * q + 3 * setting.batch * setting.new * setting.context
    return (256 << 20) + q


PEERS: Final[dict[str, Prepare]] = {"torch SDPA": sdpa, "flex_attention": flex, "FlashInfer": flashinfer}


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest distance of two answers [T, Hq, D], of one row and head, as a share of the length of `want`'s."""
    worst = []
    for at in range(0, len(want), COMPARED_ROWS):
        a, b = got[at : at + COMPARED_ROWS].float(), want[at : at + COMPARED_ROWS].float()
        worst.append(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).max())
    return float(torch.stack(worst).max())  # NaN when anything is


def check(setting: Setting, answer: torch.Tensor) -> None:
    """Compare our answer for the first sequence and the last with SDPA's, each alone.  Error: Wrong."""
    for sequence in dict.fromkeys((0, setting.batch - 1)):
        rows = slice(sequence * setting.new, (sequence + 1) * setting.new)
        frame, shift, count = setting.pages.frame, setting.pages.shift, setting.pages.count
        one = slice(sequence, sequence + 1)
        alone = setting._replace(q=setting.q[rows], pages=PageTable(frame[one], shift[one], count[one]), batch=1)
        share = apart(answer[rows], sdpa(alone)())
        if not share <= TOLERANCE:
            raise Wrong(f"sequence {sequence} of {setting.batch} is {share:.3g} of its length away from torch SDPA's")


def prepared(name: str, setting: Setting, answer: torch.Tensor, room_bytes: int) -> Call:
    """The peer's call, compared with our answer.  Error: PeerMissing; Wrong, when it is SDPA that says something else."""
    needed = own_bytes(name, setting)
    if needed > room_bytes:
        raise PeerMissing(f"it takes {needed / 2**30:.1f} GiB beside ours, and there are {room_bytes / 2**30:.1f}")
    try:
        call = PEERS[name](setting)
        got = call()
    except PeerMissing:
        raise
    except Exception as error:  # whatever a foreign library says: it is missing from this case, and the rest goes on
        raise PeerMissing(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}") from error
    share = apart(got, answer)
    if share <= TOLERANCE:
        return call
    if name == "torch SDPA":
        raise Wrong(f"it is {share:.3g} of a row's length away from torch SDPA's")
    raise PeerMissing(f"it computes something else: {share:.3g} of a row's length apart")
