"""A simulated system whose passes take time: a clock for tests of scheduling.

A pass costs PASS_NS, each token of a prompt in it PROMPT_NS, each context that decodes in it DECODE_NS.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from attnix.drivers.sim_device import SimDevice
from attnix.kernel.batch import unpack_seqs
from attnix.kernel.core import Core
from attnix.kernel.events import Connect, Exec, ExecDone
from attnix.kernel.geometry import RowLayout
from attnix.simulated import SimulatedClient, SimulatedSystem, ints

MS: Final = 1_000_000
PASS_NS, PROMPT_NS, DECODE_NS = 10 * MS, MS // 4, MS // 2


class TimedSystem(SimulatedSystem):
    """`run` completes a pass when the clock has reached its end; what `at` was told happens on the way."""

    def __init__(
        self, *, window_tokens: int = 1024, vocab_tokens: int = 4096, frames: int = 400, **options: Any
    ) -> None:
        def make(count: int, layout: RowLayout, rows: memoryview) -> Any:
            return SimDevice(
                count, layout, rows, options.get("block_tokens", 4), vocab_tokens, gates=bytearray(8 << 10)
            )

        self.arrivals: list[tuple[int, Callable[[], object]]] = []
        self.token_ns: dict[tuple[int, int], list[int]] = {}  # by (conn, request): when each token came
        self.passes: list[tuple[int, list[tuple[int, int]]]] = []  # when it ended, [(context, tokens)]
        super().__init__(
            frames=frames, window_tokens=window_tokens, vocab_tokens=vocab_tokens, core=Core, make_device=make,
            check=False, **options,
        )  # fmt: skip

    def at(self, ns: int, what: Callable[[], object]) -> None:
        self.arrivals.append((ns, what))
        self.arrivals.sort(key=lambda pair: pair[0])

    def _due(self, ns: int) -> None:
        while self.arrivals and self.arrivals[0][0] <= ns:
            when, what = self.arrivals.pop(0)
            self.now_ns = max(self.now_ns, when)
            what()

    def tick(self, device: int = 0) -> bool:
        if not self.pending[device]:
            if device == 0 and self.arrivals:
                self._due(self.arrivals[0][0])
                return True
            return False
        effect = self.pending[device][0]
        if not isinstance(effect, Exec):
            return super().tick(device)
        seqs = unpack_seqs(effect.seqs)
        took_ns = PASS_NS + sum(PROMPT_NS * q.ntokens if q.ntokens > 1 else DECODE_NS for q in seqs)
        end_ns = self.now_ns + took_ns
        self._due(end_ns)
        self.now_ns = max(self.now_ns, end_ns)
        self.pending[device].popleft()
        done = self.perform(effect)
        assert isinstance(done, ExecDone), done
        before = {(c, r): len(tokens) for c, client in self.clients.items() for r, tokens in client.streamed.items()}
        self.passes.append((self.now_ns, [(q.context, q.ntokens) for q in seqs]))
        self.step(done._replace(compute_ns=took_ns))
        for c, client in self.clients.items():
            for r, tokens in client.streamed.items():
                if len(tokens) > before.get((c, r), 0):
                    self.token_ns.setdefault((c, r), []).append(self.now_ns)
        return True

    def gaps_ms(self, client: SimulatedClient, request: int) -> list[float]:
        """Between the tokens of a stream."""
        times = self.token_ns[client.conn, request]
        return [(b - a) / MS for a, b in pairwise(times)]

    def user(self, uid: int = 1000) -> SimulatedClient:
        """A client whose hello runs no device."""
        self._next_conn += 1
        client = SimulatedClient(self, self._next_conn, uid)
        self.clients[client.conn] = client
        self.step(Connect(client.conn, uid, uid, 1))
        client.result(client.post("hello", "test", 1))
        return client

    def ask(
        self, client: SimulatedClient, prompt: list[int], answer: int, pid: int = 0, **targets: int
    ) -> tuple[int, int]:
        """A context with that prompt and a generation on it: (handle, request)."""
        ctx = client.result(client.post("alloc_context", pid)).ctx
        client.post("append", ctx, ints(prompt))
        rest = (
            0.0,
            0,
            1.0,
            0.0,
            0,
            1.0,
            0.0,
            0.0,
            0,
            (),
            b"",
            True,
            True,
            targets.get("ttft_ms", 0),
            targets.get("tpot_ms", 0),
        )
        return ctx, client.post("generate", ctx, answer, *rest)

    def ask_at(
        self,
        ns: int,
        into: list[int],
        client: SimulatedClient,
        prompt: list[int],
        answer: int,
        pid: int = 0,
        **targets: int,
    ) -> None:
        """The same, later; the request goes into the list."""
        self.at(ns, lambda: into.append(self.ask(client, prompt, answer, pid, **targets)[1]))


def fresh(number: int, length: int) -> list[int]:
    """A prompt that shares no block with one of another number (below 4,000)."""
    return [number, *(1 + (number * 7 + i) % 60 for i in range(length - 1))]


def p99(values: list[float]) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 99 // 100) - 1]
