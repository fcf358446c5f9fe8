"""A real daemon whose accel is the CUDA engine in a dry run, against one on the CPU engine: the same tokens over the socket."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from attnix.syscalls import Client, connect
from attnix.syscalls.records import unpack_ids
from attnix.userland.launch import Launched, launch, stop

Tiny = Callable[[str], tuple[Path, Any]]
pytestmark = pytest.mark.e2e
FRAME_BYTES = 2 * 3 * 2 * 16 * 32 * 4  # K and V, layers, KV heads, tokens, head dim, float32
PROMPTS = [[(7 * n + 31 * k * k + k) % 300 for k in range(30 + 9 * n)] for n in range(5)]


@pytest.fixture(scope="module")
def model(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, which the daemon wants."""
    folder = tmp_path_factory.mktemp("dry") / "model"
    shutil.copytree(tiny_model("qwen3")[0], folder)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made = tokenizers.Tokenizer(tokenizers.models.BPE({piece: n for n, piece in enumerate(sorted(alphabet))}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def boot(model: Path, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """boot(device, *flags) -> a client of a daemon in float32."""
    launched: list[Launched] = []
    clients: list[Client] = []

    def start(device: str, *flags: str) -> Client:
        folder = tmp_path / f"{device}{len(launched)}"
        given = [
            "--model",
            str(model),
            "--state-dir",
            str(folder),
            "--threads",
            "1",
            "--device",
            device,
            "--max-contexts",
            "32",
        ]
        given += ["--dtype", "float32", "--kv-dtype", "float32", "--numerics", "invariant", *flags]
        launched.append(launch(given, str(folder / "s.sock"), str(folder / "log"), 120))
        clients.append(connect(launched[-1].socket, timeout=120))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    assert [stop(one.process) for one in launched] == [0] * len(launched)


def said(
    system: Client, prompts: Sequence[Sequence[int]], tokens: int, at: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """All prompts at once; at: done when they are under way."""
    contexts = [system.alloc_context() for _ in prompts]
    for context, prompt in zip(contexts, prompts, strict=True):
        context.append(tokens=list(prompt))
    streams = [context.stream(tokens, ignore_eos=True) for context in contexts]
    at()
    answers = [unpack_ids(stream.result().tokens) for stream in streams]
    for context in contexts:
        context.release()
    return [list(answer) for answer in answers]


def test_a_daemon_on_the_dry_engine_says_what_one_on_the_cpu_says(boot: Callable[..., Client]) -> None:
    """With everything in hbm; then out of 12 frames over dram, twice, so that contexts leave and come back; and the engine's
    process is killed in the middle, which costs it all frames."""
    expected = said(boot("cpu", "--hbm", "4MiB"), PROMPTS, 24)
    assert len({tuple(answer) for answer in expected}) == len(expected)
    system = boot("cuda-dry", "--hbm", str(12 * FRAME_BYTES), "--dram", "4MiB")
    tier = system.tiers().tiers[0]
    assert (tier.tier, tier.capacity_frames, tier.frame_bytes) == ("hbm", 12, FRAME_BYTES)
    assert said(system, PROMPTS, 24) == expected
    assert system.vmstat().counters["demoted_blocks"] > 0
    pid = system.tiers().tiers[0].driver_pid

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)

    assert said(system, PROMPTS, 24, kill) == expected
    end = time.monotonic() + 120  # where the answers were there before the kill, the next one may not be up yet
    while not any("epoch 2, frames lost" in row.text for row in system.dmesg(0).rows):
        assert time.monotonic() < end, "it did not come back"
    assert system.tiers().tiers[0].driver_pid != pid
    assert any("cuda-dry/torch/float32" in row.text for row in system.dmesg(0).rows)
    assert system.fsck().problems == ()
