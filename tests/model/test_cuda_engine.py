"""The CUDA engine in a dry run against the CPU engine: the same passes on the same frames, weights and page tables.

Float32: logits within 1e-4 of the largest, tokens equal.  docs/cuda.md says what this shows and what only a device can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnix.drivers.accel.config import KvDtype
from attnix.drivers.accel.cuda import errors
from attnix.drivers.accel.cuda.device import DryDevice, DryStream
from attnix.drivers.accel.cuda.engine import CudaEngine
from attnix.drivers.accel.cuda.frames import resolved
from attnix.drivers.accel.cuda.graphs import BATCH_BUCKETS, Bucket, DecodeGraphs, bucket_of
from attnix.drivers.accel.cuda.ops import TorchOps
from attnix.drivers.accel.cuda.weights import Shard
from attnix.drivers.accel.model import PageRows, PassRefused
from attnix.drivers.accel.weights import load_model
from attnix.kernel.batch import ALLOWED, FORWARD, HISTORY, SAMPLE
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed
from attnix.kernel.geometry import RowLayout

Tiny = Callable[[str], tuple[Path, Any]]
F32 = npt.NDArray[np.float32]
BLOCK = 16
NO_COPIES = np.empty((0, 2), np.int32)
DRY = {"device": "cuda-dry", "mirror": True}
pytestmark = pytest.mark.usefixtures("one_torch_thread")
MODELS = ("llama", "llama-tied", "llama3-rope", "llama-linear-rope", "mistral", "qwen2", "qwen3")


@pytest.fixture
def both(engine: Any) -> Callable[..., tuple[Any, Any]]:
    """both(path, dtype) -> two rigs, the second of which runs the CUDA engine."""

    def make(path: Path, dtype: KvDtype = "float32") -> tuple[Any, Any]:
        cpu, dry = engine(path, dtype), engine(path, dtype)
        config, weights, _ = load_model(path)
        dry.model = CudaEngine(
            config, weights, DryDevice(), TorchOps(), kv_dtype=dtype, dtype="bfloat16" if dtype == "bfloat16" else "float32",
            numerics="invariant", mirror=True,
        )  # fmt: skip
        dry.model.attach(dry._arena, dry.rows, BLOCK, dry._arena.size // dry.model.frame_bytes(BLOCK))
        return cpu, dry

    return make


def text_of(n: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 300, n)]


def close(got: F32, expected: F32, relative: float = 1e-4) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= relative * np.abs(expected).max()


def run(rig: Any, slots: Sequence[int], tokens: Sequence[Sequence[int]], copies: Any = NO_COPIES, **fields: Any) -> F32:
    """Logits of the last token of each."""
    records = rig.seqs(slots, [len(part) for part in tokens], **fields)
    flat = np.array([token for part in tokens for token in part], np.int32)
    want = (records["token_offset"] + records["ntokens"] - 1).astype(np.int32)
    logits: F32 = rig.model.forward(records, flat, np.array(copies, np.int32).reshape(-1, 2), want)
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_cpu_engine(tiny_model: Tiny, both: Any, name: str) -> None:
    """A prompt, a chunk on top, single tokens, and all of it in one piece; every token's logits."""
    cpu, dry = both(tiny_model(name)[0])
    text = text_of(70)
    for rig in (cpu, dry):
        rig.parts = np.concatenate(
            [rig.logits(0, part) for part in (text[:37], text[37:64], *([t] for t in text[64:]))]
        )
    close(dry.parts, cpu.parts)
    assert (dry.parts.argmax(1) == cpu.parts.argmax(1)).all()
    close(dry._arena.view(np.float32), cpu._arena.view(np.float32))  # and so is the KV
    close(dry.logits(1, text), cpu.parts)


@pytest.mark.parametrize(("dtype", "relative"), [("bfloat16", 0.04), ("int8", 0.01)])
def test_narrow_frames(tiny_model: Tiny, both: Any, dtype: KvDtype, relative: float) -> None:
    """int8: the same bytes but for values that rounding puts on another side."""
    cpu, dry = both(tiny_model("qwen3")[0], dtype)
    text = text_of(50)
    for rig in (cpu, dry):
        rig.parts = np.concatenate([rig.logits(0, text[:40]), *(rig.logits(0, [token]) for token in text[40:])])
    close(dry.parts, cpu.parts, relative)
    if dtype == "int8":
        assert (cpu._arena != dry._arena).mean() < 0.01


def test_a_mixed_pass_is_its_parts(tiny_model: Tiny, both: Any) -> None:
    """Decoding sequences and prefill chunks in one pass, of which some write from the middle."""
    cpu, dry = both(tiny_model("llama")[0])
    text = text_of(60)
    for rig in (cpu, dry):
        run(rig, [0, 1, 2], [text[:20], text[:33], text[5:21]])
        rig.mixed = run(rig, [3, 0, 1, 2], [text[:17], text[20:21], text[33:50], text[21:22]])
        rig.alone = run(rig, [4], [text[:21]])
    close(dry.mixed, cpu.mixed)
    close(dry.mixed[1:2], dry.alone)


def test_relocated_runs(tiny_model: Tiny, both: Any) -> None:
    """Runs with shifts of both signs and short blocks; a prefill chunk and a token on top."""
    cpu, dry = both(tiny_model("llama")[0])
    text = text_of(60, 4)
    for rig in (cpu, dry):
        run(rig, [0], [text[:48]])
        rig.rows.shift[0, :3] = [3, -7, 20]
        rig.chunk = run(rig, [0], [text[48:57]])
        rig.token = run(rig, [0], [text[57:58]])
        rig.rows.shift[0, :3] = 0
        rig.plain = run(rig, [0], [text[58:59]])
    close(dry.chunk, cpu.chunk)
    close(dry.token, cpu.token)
    assert np.abs(dry.plain - dry.token).max() > 0.01  # the shifts matter


@given(copies=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_copies_at_once_are_copies_in_order(copies: list[tuple[int, int]]) -> None:
    expected = list(range(10))
    for source, target in copies:
        expected[target] = expected[source]
    at_once = list(range(10))
    for source, target in resolved(copies):
        at_once[target] = source
    assert at_once == expected
    assert len({target for _, target in resolved(copies)}) == len(resolved(copies))


def test_copies_come_first(tiny_model: Tiny, both: Any) -> None:
    """A chain, a swap (through a third), and a token written into the copy."""
    cpu, dry = both(tiny_model("llama")[0])
    text = text_of(40)
    for rig in (cpu, dry):
        run(rig, [0], [text[:36]])
        frames = [int(frame) for frame in rig.rows.frame[0, :3]]
        spare = [frame for frame in range(128) if frame not in frames][:2]
        rig.rows.frame[0, 2] = spare[1]
        copies = [(frames[2], spare[0]), (spare[0], spare[1]), (frames[0], spare[0]), (frames[1], frames[2])]
        rig.after = run(rig, [0], [text[36:37]], copies)
    close(dry.after, cpu.after)
    close(dry._arena.view(np.float32), cpu._arena.view(np.float32))


def test_refusals_are_those_of_the_cpu_engine(tiny_model: Tiny, both: Any) -> None:
    """The same reason and the same detail, and no byte of a frame changes."""
    cpu, dry = both(tiny_model("llama")[0])
    text = text_of(20)
    for rig in (cpu, dry):
        run(rig, [0, 1], [text, text[:10]])
    good, _ = (rig.seqs([0, 1], [1, 1]) for rig in (cpu, dry))
    before = dry._arena.copy()

    def refusal(rig: Any, seqs: Any, tokens: Sequence[int], want: int, copies: Any, gates: Any) -> tuple[str, int]:
        with pytest.raises(PassRefused) as refused:
            rig.model.forward(
                seqs, np.array(tokens, np.int32), np.array(copies, np.int32).reshape(-1, 2), np.array([want], np.int32),
                np.array(gates, np.int64).reshape(-1, 2),
            )  # fmt: skip
        return refused.value.reason.name, refused.value.detail

    cases: list[tuple[str, dict[str, Any]]] = [
        (field, {"fields": {field: value}})
        for field, value in (
            ("slot", 8), ("slot", -1), ("generation", 4), ("entries", 0), ("entries", 4000), ("start", 200),
            ("start", -1), ("ntokens", 0), ("start", 2**31 - 1), ("ntokens", 2), ("token_offset", 0), ("start", 256),
        )
    ]  # fmt: skip
    cases += [("tokens", {"tokens": [1, 300]}), ("tokens", {"tokens": [-1, 1]}), ("tokens", {"tokens": [1]})]
    cases += [("want", {"want": 2}), ("want", {"want": -1}), ("copies", {"copies": [[0, 128]]})]
    cases += [("copies", {"copies": [[0, 1], [-1, 2]]}), ("gates", {"gates": [[0, 1]]})]
    for _, case in cases:
        found = []
        for rig in (cpu, dry):
            seqs = good.copy()
            for name, value in case.get("fields", {}).items():
                seqs[name][1] = value
            found.append(
                refusal(
                    rig,
                    seqs,
                    case.get("tokens", [1, 2]),
                    case.get("want", 0),
                    case.get("copies", []),
                    case.get("gates", []),
                )
            )
        assert found[0] == found[1], case
    assert {name for name, _ in cases} >= {"slot", "entries", "tokens", "want", "copies", "gates"}
    for entry, value in (("count", 17), ("count", -1), ("frame", 128), ("frame", -1)):
        found = []
        for rig in (cpu, dry):
            row = getattr(rig.rows, entry)
            kept, row[1, 0] = int(row[1, 0]), value
            found.append(refusal(rig, good, [1, 2], 0, [], []))
            row[1, 0] = kept
        assert found[0] == found[1], entry
    assert np.array_equal(dry._arena, before)


# -- graphs -------------------------------------------------------------------------------------------------------


def test_buckets() -> None:
    assert bucket_of(1, 1, 8) == Bucket(1, 8)  # a row shorter than the smallest width
    assert bucket_of(3, 64, 1000) == Bucket(4, 64)
    assert bucket_of(9, 65, 1000) == Bucket(16, 512)
    assert bucket_of(256, 513, 1000) == Bucket(256, 1000)
    assert bucket_of(1, 5000, 8192, True) == Bucket(1, 8192, True)
    assert bucket_of(257, 1, 8) is None
    for n in range(1, 257):
        bucket = bucket_of(n, 1, 8)
        assert bucket is not None and bucket.sequences >= n
        assert n == 1 or max(size for size in (0, *BATCH_BUCKETS) if size < bucket.sequences) < n, (
            "a smaller one would do"
        )


def test_a_bucket_is_eager_then_captured_then_replayed() -> None:
    inputs = torch.zeros(2)
    ran: list[float] = []

    def compute() -> torch.Tensor:
        ran.append(float(inputs.sum()))
        return inputs * 2

    graphs = DecodeGraphs(DryDevice())
    for step in range(4):
        inputs.fill_(step)
        assert graphs.run(Bucket(2, 8), 1, compute).tolist() == [2.0 * step] * 2
    assert graphs.counters == {"eager_passes": 1, "captured_graphs": 1, "replayed_passes": 3}
    assert ran == [0.0, 2.0, 4.0, 6.0]
    graphs.run(Bucket(2, 8), 7, compute)  # its inputs have moved: what was captured reads elsewhere
    assert graphs.counters["captured_graphs"] == 2
    graphs.forget()
    graphs.run(Bucket(2, 8), 7, compute)
    assert graphs.counters["captured_graphs"] == 3


def test_places_that_stay_free_in_a_bucket_do_no_harm(tiny_model: Tiny, both: Any) -> None:
    """Five sequences in a bucket of eight, over and over: the logits of each alone, and no frame but theirs changes."""
    cpu, dry = both(tiny_model("llama")[0])
    text = text_of(40)
    for rig in (cpu, dry):
        run(rig, range(5), [text[n : n + 10 + n] for n in range(5)])
    mapped = {int(frame) for frame in dry.rows.frame[:5].ravel() if frame >= 0}
    dry._arena.reshape(128, -1)[[frame for frame in range(128) if frame not in mapped]] = 0x11
    for step in range(5):
        tokens = [[text[20 + step + n]] for n in range(5)]
        close(run(dry, range(5), tokens), run(cpu, range(5), tokens))
    mapped |= {int(frame) for frame in dry.rows.frame[:5].ravel() if frame >= 0}
    others = dry._arena.reshape(128, -1)[[frame for frame in range(128) if frame not in mapped]]
    assert (others == 0x11).all()
    assert dry.model.counters == {"eager_passes": 1, "captured_graphs": 1, "replayed_passes": 4}


def test_only_wanted_rows_come_out_of_a_bucket(tiny_model: Tiny, both: Any) -> None:
    cpu, dry = both(tiny_model("llama")[0])
    text = text_of(30)
    for rig in (cpu, dry):
        run(rig, range(3), [text[:9], text[:5], text[:7]])
    for want in ([2, 0], [1], [], [1, 1, 2]):
        found = []
        for rig in (cpu, dry):
            records = rig.seqs(range(3), [1, 1, 1])
            rows = np.array(want, np.int32)
            found.append(rig.model.forward(records, np.array(text[10:13], np.int32), NO_COPIES, rows))
            for slot in range(3):
                rig.lengths[slot] -= 1
        if want:
            close(found[1], found[0])
        assert found[1].shape == (len(want), 300)


# -- the driver over it -------------------------------------------------------------------------------------------


def outcome(rig: Any, slots: Sequence[int], tokens: Sequence[Sequence[int]], flags: int = SAMPLE, **fields: Any) -> Any:
    records = rig.seqs(slots, [len(part) for part in tokens], flags, **fields)
    return rig.execute(records, [token for part in tokens for token in part])


def test_greedy_tokens_are_those_of_the_cpu_engine_however_they_are_computed(tiny_model: Tiny, backend: Any) -> None:
    """In a batch, alone, and in chunks."""
    path, _ = tiny_model("qwen3")
    prompts = [text_of(n, n) for n in (30, 1, 17, 16, 40, 8)]
    expected = backend(path).greedy(prompts, 20)
    assert len({token for tokens in expected for token in tokens}) > 20
    assert backend(path, settings=DRY).greedy(prompts, 20) == expected
    alone = backend(path, settings=DRY)
    for slot, prompt in enumerate(prompts[:2]):
        said = []
        for at in range(0, len(prompt), 7):
            step = outcome(alone, [slot], [prompt[at : at + 7]])
        said = np.frombuffer(step.tokens, np.int32).tolist()
        while len(said) < 20:
            step = outcome(alone, [slot], [said[-1:]])
            said += np.frombuffer(step.tokens, np.int32).tolist()
        assert said == expected[slot]


def of_the_device(code: int, text: str) -> torch.AcceleratorError:
    """As torch raises it (torch/csrc/Exceptions.cpp)."""
    error: Any = torch.AcceleratorError(text)
    error.error_code = code
    found: torch.AcceleratorError = error
    return found


NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    of_the_device(2, "CUDA error: out of memory"),  # pinned memory, a graph's instantiation
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


@pytest.mark.parametrize("error", NO_MEMORY, ids=("allocator", "runtime", "triton", "cublas"))
@pytest.mark.parametrize("where", [(TorchOps, "silu_mul"), (torch.Tensor, "index_copy_")], ids=("layer", "page table"))
def test_running_out_of_device_memory_is_an_errno(
    tiny_model: Tiny, backend: Any, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], error: RuntimeError
) -> None:
    """The pass fails with ENOMEM, and the next one is as if nothing had been."""
    monkeypatch.setattr(errors, "end_driver", lambda error: pytest.fail(f"the driver would end: {error}"))
    path, _ = tiny_model("llama")
    rig = backend(path, settings=DRY)
    text = text_of(20)
    assert isinstance(outcome(rig, [0], [text]), ExecDone)

    def exhausted(*args: Any) -> torch.Tensor:
        raise error

    with monkeypatch.context() as planted:
        planted.setattr(*where, exhausted)
        failed = outcome(rig, [1], [text])
    assert isinstance(failed, ExecFailed) and failed.code == E.ENOMEM and str(error) in failed.reason
    rig.lengths[1] = 0
    assert outcome(rig, [1], [text]).tokens == outcome(backend(path), [1], [text]).tokens


@pytest.mark.parametrize("error", [*NO_MEMORY, of_the_device(700, "CUDA error: an illegal memory access")])
def test_what_sticks_ends_the_driver_and_no_memory_does_not(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    ended: list[Exception] = []
    monkeypatch.setattr(errors, "end_driver", ended.append)
    sticks = "illegal" in str(error)
    with pytest.raises(torch.AcceleratorError if sticks else MemoryError), DryDevice().computing():
        raise error
    assert ended == ([error] if sticks else [])


@pytest.mark.parametrize("error", NO_MEMORY[:2], ids=("allocator", "instantiation"))
def test_a_bucket_whose_graph_finds_no_memory_runs_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: RuntimeError
) -> None:
    """From then on, and with no further attempt; other buckets have graphs still."""
    tried: list[int] = []

    def exhausted(self: DryDevice, work: Callable[[], None]) -> Any:
        tried.append(1)
        raise error

    graphs = DecodeGraphs(DryDevice())
    with monkeypatch.context() as planted:
        planted.setattr(DryDevice, "capture", exhausted)
        for step in range(4):
            assert graphs.run(Bucket(2, 8), 1, lambda step=step: torch.tensor([step])).item() == step  # type: ignore[misc]
    assert len(tried) == 1 and "Bucket(sequences=2" in capsys.readouterr().err
    for step in range(3):
        assert graphs.run(Bucket(2, 8), 1, lambda step=step: torch.tensor([step])).item() == step  # type: ignore[misc]
        graphs.run(Bucket(4, 8), 1, lambda: torch.zeros(1))
    assert graphs.counters == {"eager_passes": 8, "captured_graphs": 1, "replayed_passes": 2}


def test_frames_that_do_not_fit_the_device_are_said(tiny_model: Tiny) -> None:
    config, weights, _ = load_model(tiny_model("llama")[0])
    model = CudaEngine(config, weights, DryDevice(memory_bytes=1 << 20), TorchOps())
    layout = RowLayout(1, 8)
    with pytest.raises(MemoryError, match="give less --hbm"):
        model.attach(None, PageRows.over(np.zeros(layout.total_bytes, np.uint8), layout), BLOCK, 1 << 20)


def test_a_bad_temperature_leaves_the_page_tables_right(tiny_model: Tiny, backend: Any) -> None:
    """A pass that is refused after its rows were looked at must not count as having sent them."""
    path, _ = tiny_model("llama")
    rig, text = backend(path, settings=DRY), text_of(20)
    failed = outcome(rig, [0], [text], temperature=np.inf)
    assert isinstance(failed, ExecFailed) and failed.code == E.EINVAL
    rig.lengths[0] = 0
    assert outcome(rig, [0], [text]).tokens == outcome(backend(path), [0], [text]).tokens


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 2.0, "top_k": 1}, {"temperature": 1.0, "top_k": 1000}, {"temperature": 1e-6},
        {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "min_p": 1.5}, {"temperature": 100.0, "top_p": 0.999},
    ],
)  # fmt: skip
def test_draws_are_those_of_the_host_sampler(tiny_model: Tiny, backend: Any, options: dict[str, Any]) -> None:
    """Twenty seeds: tokens, log-probabilities and alternatives as the CPU engine's sampler has them."""
    path, _ = tiny_model("llama")
    text = text_of(12)
    for seed in (1, 2**63 + 5, *range(100, 118, 6)):
        done = []
        for rig in (backend(path), backend(path, settings=DRY)):
            seeds = np.arange(8, dtype=np.uint64) + np.uint64(seed)
            done.append(outcome(rig, range(8), [text] * 8, seed=seeds, logprobs=3, **options))
        assert np.array_equal(np.frombuffer(done[1].tokens, np.int32), np.frombuffer(done[0].tokens, np.int32))
        close(np.frombuffer(done[1].logprobs, np.float32), np.frombuffer(done[0].logprobs, np.float32))
        for mine, theirs in zip(done[1].tops, done[0].tops, strict=True):
            assert mine[0] == theirs[0]
            close(np.frombuffer(mine[1], np.float32), np.frombuffer(theirs[1], np.float32))


def test_rows_with_and_without_penalties_in_one_pass(tiny_model: Tiny, backend: Any) -> None:
    """Those with a history are drawn by the host, in their places in the batch."""
    path, _ = tiny_model("llama")
    text = text_of(12)
    done = []
    for rig in (backend(path), backend(path, settings=DRY)):
        records = rig.seqs(
            range(5), [12] * 5, temperature=0.8, frequency_penalty=3.0, repetition_penalty=1.4, prompt_tokens=2
        )
        records["seed"] = range(5)
        records["flags"][[1, 3]] |= HISTORY
        done.append(rig.execute(records, text * 5, [np.array(text, np.int32)] * 2))
    assert done[1].tokens == done[0].tokens
    close(np.frombuffer(done[1].logprobs, np.float32), np.frombuffer(done[0].logprobs, np.float32))


def test_alternatives_with_and_without_masks_in_one_pass(tiny_model: Tiny, backend: Any) -> None:
    """A mask leaves few tokens, or more than are wanted; the others' alternatives stay in their places."""
    path, _ = tiny_model("llama")
    text = text_of(12)
    masks = [np.isin(np.arange(300), allowed) for allowed in ([7, 3, 250], range(0, 300, 3))]
    packed = tuple(np.packbits(mask, bitorder="little").tobytes() for mask in masks)
    done = []
    for rig in (backend(path), backend(path, settings=DRY)):
        records = rig.seqs(range(4), [12] * 4, FORWARD, logprobs=5)
        records["flags"][[0, 2]] |= ALLOWED
        tokens = np.array(text * 4, np.int32).tobytes()
        done.append(rig.backend.execute(Exec(0, 1, records.tobytes(), tokens, b"", (), b"", packed)))
    assert [len(ids) // 4 for ids, _ in done[1].tops] == [3, 5, 5, 5]
    assert [ids for ids, _ in done[1].tops] == [ids for ids, _ in done[0].tops]
    for (_, mine), (_, theirs) in zip(done[1].tops, done[0].tops, strict=True):
        close(np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32))


# -- parts --------------------------------------------------------------------------------------------------------


def test_the_stand_in_does_side_work_no_earlier_than_it_must() -> None:
    stream, done = DryStream(), []
    stream.run(lambda: done.append(1))
    first = stream.mark()
    stream.run(lambda: done.append(2))
    second = stream.mark()
    assert done == []
    first.wait()
    assert done == [1]
    first.synchronize()
    assert done == [1]
    second.synchronize()
    assert done == [1, 2]


def test_ranks_hold_shares_that_add_up(tiny_model: Tiny) -> None:
    """What a second GPU would need: each rank's share of o and down, summed, is the whole product."""
    config, weights, _ = load_model(tiny_model("llama")[0])
    from attnix.drivers.accel.cuda.weights import load_weights

    whole = load_weights(config, weights, torch.device("cpu"), torch.float32)
    parts = [load_weights(config, weights, torch.device("cpu"), torch.float32, Shard(2, rank)) for rank in range(2)]
    assert [part.heads for part in parts] == [config.heads // 2] * 2
    x = torch.randn(3, config.intermediate, generator=torch.Generator().manual_seed(1))
    half = config.intermediate // 2
    summed = sum(
        x[:, rank * half : (rank + 1) * half] @ part.layers[0].down.T for rank, part in enumerate(parts)
    )  # fmt: skip
    torch.testing.assert_close(summed, x @ whole.layers[0].down.T)
    assert torch.equal(
        torch.cat([part.layers[1].gate_up[:half] for part in parts]), whole.layers[1].gate_up[: config.intermediate]
    )
    with pytest.raises(ValueError, match="do not divide"):
        load_weights(config, weights, torch.device("cpu"), torch.float32, Shard(3, 0))
