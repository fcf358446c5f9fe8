"""`python -m attnix.replay` on a trace file, as a user calls it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from attnix.kernel.evict import registry
from attnix.kernel.evict.fifo import Fifo
from attnix.kernel.evict.protocol import BlockView
from attnix.kernel.order import registry as orders
from attnix.kernel.order.fcfs import Fcfs
from attnix.kernel.order.protocol import Key, Waiting
from attnix.replay.__main__ import main, size_bytes
from attnix.replay.profile import PROFILES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty prompts over eight stems, in the form of the mooncake traces; some overlap, some repeat."""
    rows = []
    for i in range(60):
        blocks = [i % 8, *([100 + i % 16, 200 + i % 16] if i % 3 else [])]
        rows.append(
            {"timestamp_ms": 150 * i, "input_length": 512 * len(blocks) + 7 * i % 512, "output_length": 1 + i % 5, "hash_ids": blocks}
        )  # fmt: skip
    path = tmp_path / "little.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv, "--json", "-"]) == 0
    return capsys.readouterr().out


def test_the_same_run_twice_is_the_same_document(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (str(trace), "--capacity", "40", "--profile", "laptop")
    text = document(capsys, *argv)
    assert document(capsys, *argv) == text
    (result,) = json.loads(text)["results"]
    assert result["requests"] == 60 and result["policy"] == "lru"
    assert 0 < result["hit_ratio"] <= result["bound_hit_ratio"]
    assert json.loads(document(capsys, str(trace), "--capacity", "30", "--profile", "laptop"))["results"][0] != result


def test_table_and_picture(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "little.png"
    assert main([str(trace), "--capacity", "50%", "--policy", "lru,lru", "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("little: 60 requests, ")
    assert lines[2].split()[:3] == ["policy", "hit", "bound"]
    assert [line.split()[0] for line in lines[3:5]] == ["lru", "lru"]
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n") and len(data) > 5000


class FailsToEvict(Fifo):
    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        raise ZeroDivisionError("by nothing")


class FailsToOrder(Fcfs):
    plain = False  # so that it is asked

    def key(self, job: Waiting) -> Key:
        raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policy", "mine"], "eviction policy mine failed in victims (ZeroDivisionError: by nothing): what was measured is lru"),
        (["--sysctl", "sched.policy=mine"], "scheduling policy mine failed in key (ZeroDivisionError: by nothing): what was measured is fcfs"),
    ],
)  # fmt: skip
def test_a_policy_that_fails_is_named_and_has_no_numbers(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], says: str
) -> None:
    """The kernel goes on with its own, whose numbers would stand under the other's name."""
    monkeypatch.setattr(registry, "_registered", {"mine": FailsToEvict})
    monkeypatch.setattr(orders, "_registered", {"mine": FailsToOrder})
    assert main([str(trace), "--capacity", "10", "--profile", "laptop", *argv]) == 1
    said = capsys.readouterr()
    assert says in said.err
    assert not said.out


def test_what_is_refused(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--hbm", "1KiB"]) == 1
    assert main([str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err
    for usage, told in (
        (["--policy", "clairvoyant"], "lru"),
        (["--capacity", "5%", "--hbm", "1GiB"], "--hbm"),
        (["--capacity", "5%", "--waits", "lru,clairvoyant"], "no 'clairvoyant'"),
        (["--waits", "lru"], "--capacity"),
        (["--orders", "2"], "--waits"),
    ):
        with pytest.raises(SystemExit) as wrong:
            main([str(trace), *usage])
        assert wrong.value.code == 2
        assert told in capsys.readouterr().err


def test_sizes() -> None:
    assert [size_bytes(t) for t in ("48GiB", "256G", "1.5k", "7")] == [48 << 30, 256 * 10**9, 1500, 7]
    for wrong in ("many", "-1", "5%", ""):
        with pytest.raises(ValueError, match=r"size|negative"):
            size_bytes(wrong)


def test_profiles_agree_with_what_is_known_of_the_models() -> None:
    """KV bytes of a token as the models' makers' configurations give them; decoding alone within a fifth of public figures:
    Llama 3.1 8B in 16 bits on an H100 about 150 tokens/s at batch 1 (its limit, 16.06 GB at 3.35 TB/s, is 209)."""
    assert PROFILES["h100-8b"].kv.token_bytes == 131_072
    assert PROFILES["h200-70b"].kv.token_bytes == 327_680
    assert PROFILES["laptop"].kv.token_bytes == 114_688
    assert 120 < 1e9 / PROFILES["h100-8b"].k_ns < 209
    for profile in PROFILES.values():
        assert 0 < profile.hbm_bytes < profile.dram_bytes < profile.nvme_bytes
        assert profile.prefill_ns(2048, 0) < profile.prefill_ns(2048, 8192) < profile.prefill_ns(4096, 8192)


def test_a_recording_in_the_background_is_boots(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--record", "run.log", "--daemon"]) == 2
    assert "attnix boot --daemon --record" in capsys.readouterr().err
