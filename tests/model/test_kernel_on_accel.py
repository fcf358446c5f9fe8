"""The whole kernel over the real CPU engine with a tiny random model: the same tokens, to the bit, whatever happens.

The oracle is the same request alone, cold, in one chunk, on a pool that is never short (its tokens equal transformers':
test_hf_equal.py).  Case 34 of the field cases: cold, warm, chunked 1/3/16/all, alone and among others, forked, preempted.
"""

from __future__ import annotations

import select
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnix.drivers.accel.config import KvDtype
from attnix.drivers.accel.driver import AccelBackend, AccelConfig, Devices
from attnix.drivers.accel.engine import DeepCarrier
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.sim_memory import SimTier
from attnix.drivers.stored import Gates
from attnix.kernel.config import DeviceConfig
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Transfer, TransferDone
from attnix.kernel.geometry import RowLayout
from attnix.kernel.tag import gate_value
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

Tiny = Callable[[str], tuple[Path, Any]]
BLOCK, WINDOW, VOCAB, LAYERS = 16, 192, 300, 3


class Accel(AccelBackend):
    """The driver as the simulated system drives a device.  It joins the arenas of the system once those are there."""

    arena: memoryview
    gates: Any

    def join(self, system: SimulatedSystem) -> None:
        self._transfers = self._engine.carrier(system.dram or bytearray(1 << 20), 1, system.gates)
        self._transfers.identify(bytes(16))
        self._engine.attach_gates(system.gates)
        self.arena, self.gates = self._frames, Gates(system.gates)

    def is_open(self, effect: Exec) -> bool:
        """The simulated system has one thread: what waits for another device is not begun."""
        pairs = memoryview(effect.gates).cast("q").tolist()
        return all(
            self.gates.load(gate) >= gate_value(ticket, LAYERS)
            for gate, ticket in zip(pairs[::2], pairs[1::2], strict=True)
        )

    def execute(self, effect: Exec) -> ExecDone | ExecFailed:
        """Takes a millisecond a token, says the clock of the simulated system: decisions depend on no other."""
        outcome = super().execute(effect)
        return (
            outcome._replace(compute_ns=len(effect.tokens) // 4 * 1_000_000)
            if isinstance(outcome, ExecDone)
            else outcome
        )

    def transfer(self, effect: Transfer, dram: Any = None) -> TransferDone:
        """Takes a microsecond a frame.  One that goes on beside the driver is waited for."""
        done = super().transfer(effect)
        while done is None:
            assert isinstance(self._transfers, DeepCarrier)
            select.select([self._transfers.fileno()], [], [])
            done = next(iter(self._transfers.completed()), None)
        return done._replace(elapsed_ns=len(effect.pairs) // 8 * 1000)


class AccelSystem(SimulatedSystem):
    def _tier(self, config: DeviceConfig) -> SimTier:
        return SimTier(config.capacity_frames, self._frame_bytes, BLOCK, layers=LAYERS, gates=self.gates)


def accel_system(
    path: Path,
    frames: int,
    step_tokens: int = 512,
    kv_dtype: KvDtype = "float32",
    device: Devices = "cpu",
    **tiers: Any,
) -> SimulatedSystem:
    """device: whose engine; tiers: dram, nvme, remote and direct of SimulatedSystem."""

    def make(capacity: int, layout: RowLayout, rows: memoryview) -> Accel:
        config = AccelConfig(
            str(path), layout.slots, layout.entries, BLOCK, "float32", kv_dtype, "invariant", threads=1, device=device,
            mirror=device != "cpu",
        )  # fmt: skip
        frame_bytes = load_config(path).frame_bytes(BLOCK, kv_dtype)
        backend = Accel(config, bytearray(capacity * frame_bytes), rows)
        assert backend.probe().capacity_frames == capacity
        return backend

    system = AccelSystem(
        frames=frames, block_tokens=BLOCK, window_tokens=WINDOW, vocab_tokens=VOCAB, max_contexts=24, core=Core,
        make_device=make, sysctl={"sched.step_tokens": step_tokens}, check=False, kv=load_config(path).kv_shape(kv_dtype),
        **tiers,
    )  # fmt: skip
    system.devices[0].join(system)
    return system


def prompt_of(length: int, seed: int) -> list[int]:
    return [(seed * 7919 + 31 * n * n + n) % VOCAB for n in range(length)]


def start(client: SimulatedClient, prompt: list[int], n: int) -> int:
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints(prompt))
    return client.post("generate", ctx, n, 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 3)


def outcome(client: SimulatedClient, request: int) -> tuple[list[int], tuple[tuple[float, bytes, bytes], ...]]:
    """Tokens, and log-probabilities to the bit."""
    result = client.result(request)
    return tokens_of(result.tokens), result.logprobs


def cold(
    path: Path, prompt: list[int], n: int, kv_dtype: KvDtype = "float32"
) -> tuple[list[int], tuple[tuple[float, bytes, bytes], ...]]:
    system = accel_system(path, 24, kv_dtype=kv_dtype)
    client = system.connect()
    request = start(client, prompt, n)
    system.run()
    return outcome(client, request)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 160])
def test_prompt_lengths_warm_and_cold(tiny_model: Tiny, length: int) -> None:
    """160 tokens are exactly the pool of ten frames."""
    path, _ = tiny_model("llama")
    prompt = prompt_of(length, 3)
    expected = cold(path, prompt, 6)
    system = accel_system(path, 10)
    client = system.connect()
    room = min(6, 161 - length)
    for _ in ("cold", "warm"):
        request = start(client, prompt, 6)
        system.run()
        tokens, logprobs = outcome(client, request)
        assert (tokens, logprobs) == (expected[0][:room], expected[1][:room])


def test_an_empty_prompt_is_refused(tiny_model: Tiny) -> None:
    client = accel_system(tiny_model("llama")[0], 4).connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, b"")
    with pytest.raises(Errno) as error:
        client.call("generate", ctx, 3)
    assert error.value.code is E.EINVAL


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 70),
    chunk=st.sampled_from([1, 3, 16, 24, 512]),
    others=st.integers(0, 8),
    fork_at=st.integers(0, 70),
    frames=st.sampled_from([7, 24]),
    kill_after=st.integers(0, 12),
    model=st.sampled_from(["llama", "qwen3"]),
    kv_dtype=st.sampled_from(["float32", "int8"]),
    tiers=st.sampled_from([{}, {"dram": 30}, {"dram": 8, "nvme": 60}, {"dram": 8, "nvme": 60, "direct": True}]),
    rot=st.booleans(),
)
def test_same_tokens_and_logits_in_every_circumstance(
    tiny_model: Tiny,
    length: int,
    chunk: int,
    others: int,
    fork_at: int,
    frames: int,
    kill_after: int,
    model: str,
    kv_dtype: KvDtype,
    tiers: dict[str, Any],
    rot: bool,
) -> None:
    """rot: after every step one bit of the dram arena, anywhere, is another."""
    path, _ = tiny_model(model)
    prompt = prompt_of(length, 5)
    expected = cold(path, prompt, 12, kv_dtype)
    system = accel_system(path, frames, chunk, kv_dtype, **tiers)
    client = system.connect()
    parent = client.call("alloc_context").ctx
    client.call("append", parent, ints(prompt[:fork_at]))
    forked = client.call("fork", parent).ctxs[0]
    client.post("append", forked, ints(prompt[fork_at:]))
    requests = [client.post("generate", forked, 12, 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 3)]
    requests += [start(client, prompt_of(length, 5 if n % 2 else 50 + n), 12) for n in range(others)]
    for _ in range(kill_after):
        _ = any(system.tick(device) for device in range(len(system.devices)))
    system.kill_driver(wrote_kv=bool(kill_after % 2))
    while rot and tiers and any(system.tick(device) for device in range(len(system.devices))):
        bit = int(np.random.default_rng([length, system.now_ns]).integers(8 * len(system.dram)))
        system.dram[bit // 8] ^= 1 << bit % 8
    system.run()
    assert outcome(client, requests[0]) == expected
    for n, request in enumerate(requests[1:]):
        if n % 2:
            assert outcome(client, request) == expected
    assert system.kernel.fsck() == []


def test_many_rows_share_a_forward_and_change_nothing(tiny_model: Tiny) -> None:
    """At least eight rows per forward, counted at the engine."""
    path, _ = tiny_model("llama")
    prompts = [prompt_of(20 + n, n) for n in range(12)]
    alone = [cold(path, prompt, 16) for prompt in prompts]
    system = accel_system(path, 60)
    client = system.connect()
    requests = [start(client, prompt, 16) for prompt in prompts]
    system.run()
    assert [outcome(client, request) for request in requests] == alone
    counters = system.devices[0].health()
    assert counters["sequences"] / counters["passes"] >= 8


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_control_altering_the_kv_of_any_mapped_block_changes_the_logits(tiny_model: Tiny, kv_dtype: KvDtype) -> None:
    path, _ = tiny_model("llama")
    prompt = prompt_of(40, 3)
    expected = cold(path, prompt, 4, kv_dtype)
    for entry in range(3):
        system = accel_system(path, 10, kv_dtype=kv_dtype)
        client = system.connect()
        ctx = client.call("alloc_context").ctx
        client.call("append", ctx, ints(prompt))
        system.run()
        frame = array("i", client.call("pagemap", ctx).frames)[entry]
        backend = system.devices[0]
        at = frame * backend._frame_bytes  # the first keys of its first layer
        values = memoryview(backend._frames)[at : at + 64]
        for n in range(2, 64, 4):
            values[n] ^= 0x40  # the top bit of a mantissa, or half of an int8's range
        request = client.post("generate", ctx, 4, 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 3)
        system.run()
        assert outcome(client, request) != expected, f"block {entry} is not read"


# -- more contexts than hbm holds ---------------------------------------------------------------------------------


def chat(
    system: SimulatedSystem, contexts: int, turns: int, order_seed: int, between: Callable[[], None] = lambda: None
) -> list[Any]:
    """Contexts of 40 tokens and more, each continued `turns` times in a random order: what they said (tokens, and
    log-probabilities to the bit).  between: called after each turn of one."""
    client = system.connect()
    ctxs = [client.call("alloc_context").ctx for _ in range(contexts)]
    said: list[Any] = [[] for _ in ctxs]
    order = [n for turn in range(turns) for n in np.random.default_rng([order_seed, turn]).permutation(contexts)]
    for n in order:
        prompt = prompt_of(20 if said[n] else 40, 7 * n + len(said[n]))
        client.post("append", ctxs[n], ints(prompt))
        request = client.post("generate", ctxs[n], 5, 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 2)
        system.run()
        said[n].append(outcome(client, request))
        between()
    return said


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("tiers", [{"dram": 150}, {"dram": 24, "nvme": 150}, {"dram": 24, "nvme": 150, "direct": True}])
def test_contexts_come_back_to_the_bit_from_every_tier(
    tiny_model: Tiny, kv_dtype: KvDtype, tiers: dict[str, Any]
) -> None:
    """16 contexts of up to 8 blocks on an hbm of 12 frames: all that leaves it comes back, and nothing is computed twice."""
    path, _ = tiny_model("llama")
    large = accel_system(path, 160, kv_dtype=kv_dtype)
    expected = chat(large, 16, 4, 1)
    system = accel_system(path, 12, kv_dtype=kv_dtype, **tiers)
    assert chat(system, 16, 4, 1) == expected
    device = system.devices[0].health()
    all_tokens = 16 * (40 + 3 * 20 + 4 * 5 - 1)
    # An append that is computed before its generate begins has its last token computed once more, on either system.
    assert (
        all_tokens <= device["computed_tokens"] <= large.devices[0].health()["computed_tokens"] <= all_tokens + 16 * 4
    )
    assert device["read_frames"] > 50
    if "nvme" in tiers:
        assert system.devices[2].written_frames > 20 and system.devices[2].read_frames > 20
    assert system.kernel.fsck() == []


@pytest.mark.parametrize("tiers", [{"dram": 150}, {"dram": 24, "nvme": 150}])
def test_rotten_copies_are_found_and_computed_again(tiny_model: Tiny, tiers: dict[str, Any]) -> None:
    """After each turn a third of the dram frames have one more bit wrong: the answers are right, to the bit."""
    path, _ = tiny_model("llama")
    expected = chat(accel_system(path, 160), 16, 3, 2)
    system = accel_system(path, 12, **tiers)
    random = np.random.default_rng(3)
    stored = len(system.dram) // tiers["dram"]

    def rot() -> None:
        for frame in range(0, tiers["dram"], 3):
            at = frame * stored + int(random.integers(stored))
            system.dram[at] ^= 1 << int(random.integers(8))

    assert chat(system, 16, 3, 2, rot) == expected
    found = system.devices[0].health()["corrupt_frames"] + sum(
        device.corrupt for device in system.devices if isinstance(device, SimTier)
    )
    counters = system.connect().call("vmstat").counters
    assert counters["corrupt_copies"] >= found > 10
    assert system.kernel.fsck() == []


# -- the CUDA engine ----------------------------------------------------------------------------------------------


def near(got: Any, expected: Any) -> bool:
    """The same tokens, and log-probabilities but for rounding: the dry run sums in float64, in torch's order."""
    same = got[0] == expected[0] and [top[1] for top in got[1]] == [top[1] for top in expected[1]]
    return same and np.allclose([top[0] for top in got[1]], [top[0] for top in expected[1]], rtol=0, atol=2e-4)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(("chunk", "frames", "model"), [(3, 24, "qwen3"), (16, 7, "llama"), (512, 7, "mistral")])
def test_the_cuda_engine_says_the_same_in_every_circumstance(
    tiny_model: Tiny, chunk: int, frames: int, model: str
) -> None:
    """Cached, forked, chunked, batched, preempted, paged out, after a death that loses all frames: the tokens that the CPU
    engine says when it is alone and cold."""
    path, _ = tiny_model(model)
    prompt = prompt_of(50, 5)
    expected = cold(path, prompt, 12)
    system = accel_system(path, frames, chunk, device="cuda-dry", dram=30)
    client = system.connect()
    parent = client.call("alloc_context").ctx
    client.call("append", parent, ints(prompt[:37]))
    forked = client.call("fork", parent).ctxs[0]
    client.post("append", forked, ints(prompt[37:]))
    requests = [client.post("generate", forked, 12, 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 3)]
    requests += [start(client, prompt_of(50, 5 if n % 2 else 50 + n), 12) for n in range(4)]
    for _ in range(5):
        _ = any(system.tick(device) for device in range(len(system.devices)))
    system.kill_driver(wrote_kv=True)
    system.run()
    assert near(outcome(client, requests[0]), expected)
    assert near(outcome(client, requests[2]), expected) and near(outcome(client, requests[4]), expected)
    assert near(outcome(client, requests[1]), cold(path, prompt_of(50, 50), 12))
    assert system.kernel.fsck() == []


@pytest.mark.usefixtures("one_torch_thread")
def test_contexts_come_back_to_the_cuda_engine_and_rotten_copies_do_not(tiny_model: Tiny) -> None:
    """12 contexts on an hbm of 12 frames over dram and nvme; a third of the dram has a wrong bit after each turn."""
    path, _ = tiny_model("llama")
    expected = chat(accel_system(path, 160), 12, 2, 2)
    system = accel_system(path, 12, device="cuda-dry", dram=24, nvme=150)
    random = np.random.default_rng(3)
    stored = len(system.dram) // 24

    def rot() -> None:
        for frame in range(0, 24, 3):
            system.dram[frame * stored + int(random.integers(stored))] ^= 1 << int(random.integers(8))

    said = chat(system, 12, 2, 2, rot)
    for mine, theirs in zip(said, expected, strict=True):
        assert all(near(a, b) for a, b in zip(mine, theirs, strict=True))
    health = system.devices[0].health()
    assert health["read_frames"] > 20 and health["written_frames"] > 10 and health["corrupt_frames"] > 0
    assert system.kernel.fsck() == []


def test_control_altering_kv_changes_what_the_cuda_engine_says(tiny_model: Tiny) -> None:
    path, _ = tiny_model("llama")
    prompt = prompt_of(40, 3)
    expected = cold(path, prompt, 4)
    system = accel_system(path, 10, device="cuda-dry")
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(prompt))
    system.run()
    frame, backend = array("i", client.call("pagemap", ctx).frames)[1], system.devices[0]
    values = memoryview(backend._frames)[frame * backend._frame_bytes :][:64]
    for n in range(2, 64, 4):
        values[n] ^= 0x40
    request = client.post("generate", ctx, 4, 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 3)
    system.run()
    assert not near(outcome(client, request), expected)
