"""Agents that do anything at any time on simulated devices, drawn from a seed; prints a digest of every effect.

    python random_agents.py SEED STEPS CORE

Run by test_determinism.py, in processes of their own: what a run does may depend on the seed and on nothing else.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
from collections import Counter
from typing import Any

from attnix.kernel.core import Core
from attnix.kernel.events import Syscall
from attnix.kernel.twin import TwinCore
from attnix.recording import digest_of
from attnix.simulated import SimulatedClient, SimulatedSystem, ints
from attnix.syscalls.abi import CALLS

CORES: dict[str, Any] = {"c": Core, "twin": TwinCore}
TOOLS = ("grep", "pytest", "browse", "")
_ARGS: dict[str, Any] = {call.name: call.args for call in CALLS}


class Agents:
    def __init__(self, seed: int, core: str) -> None:
        self.draw = random.Random(seed)
        self.system = SimulatedSystem(
            frames=24, dram=24, nvme=40, direct=bool(seed % 2), core=CORES[core], check=False, record=True
        )
        self.clients = [self.system.connect(uid) for uid in (1000, 1000, 1001)]
        self.held: dict[int, list[int]] = {c.conn: [] for c in self.clients}
        self.request = 1 << 20
        self.sent: list[tuple[SimulatedClient, int, str]] = []

    def call(self, client: SimulatedClient, name: str, *args: object) -> Any:
        """A call that is answered in its own step; None when it is not, or is refused."""
        self.request += 1
        client.sent.add(self.request)
        self.system.step(Syscall(client.conn, self.request, name, _ARGS[name](*args)))
        self.sent.append((client, self.request, name))
        reply = client.replies.get(self.request)
        return reply.result if reply is not None and not reply.code else None

    def act(self) -> None:
        draw, system = self.draw, self.system
        kind = draw.random()
        if kind < 0.45:
            system.tick(draw.randrange(len(system.devices)))
            return
        if kind < 0.5:
            system.advance(draw.choice((1_000, 50_000_000, 3_000_000_000)))
            return
        if kind < 0.52:
            device = draw.choice((0, 2))
            draw.choice((system.fail, system.kill_driver))(device)
            return
        client = draw.choice(self.clients)
        mine = self.held[client.conn]
        if not mine or (kind < 0.58 and len(mine) < 8):
            made = self.call(client, "alloc_context")
            if made is not None:
                mine.append(made.ctx)
                stem = [draw.randrange(3)] * draw.randrange(1, 14)
                self.call(client, "append", made.ctx, ints([*stem, *(draw.randrange(256) for _ in range(5))]))
            return
        ctx = draw.choice(mine)
        tokens = ints(draw.randrange(256) for _ in range(draw.randrange(1, 6)))
        op = draw.choice(
            ("append", "generate", "generate", "fork", "truncate", "wait", "wait", "resume", "resume", "inject", "stop", "release")
        )  # fmt: skip
        if op == "append":
            self.call(client, "append", ctx, tokens)
        elif op == "generate":
            self.call(
                client, "generate", ctx, draw.randrange(1, 9), draw.random() < 0.5, 0, 1.0, 0.0, draw.randrange(9)
            )
        elif op == "fork":
            made = self.call(client, "fork", ctx, draw.randrange(1, 3))
            mine.extend(made.ctxs if made is not None else ())
        elif op == "truncate":
            self.call(client, "truncate", ctx, draw.randrange(12))
        elif op == "wait":
            eta, deadline = draw.choice((-1, 20, 3000)), draw.choice((-1, -1, 50, 4000))
            self.call(client, "wait_tool", ctx, draw.choice(TOOLS), eta, deadline)
        elif op == "resume":
            self.call(client, "resume", ctx, 0, tokens)
        elif op == "inject":
            self.call(client, "inject", ctx, tokens)
        elif op == "stop":
            self.call(client, "kill", 0, draw.choice((signal.SIGSTOP, signal.SIGCONT, signal.SIGCONT)))
        else:
            mine.remove(ctx)
            self.call(client, "release", ctx)

    def run(self, steps: int) -> str:
        for _ in range(steps):
            self.act()
        digest = hashlib.blake2b(digest_size=16)
        for now_ns, event, effects in self.system.log:
            digest.update(f"{now_ns} {type(event).__name__}".encode())
            digest.update(digest_of(effects))
        return digest.hexdigest()

    def done(self) -> dict[str, int]:
        """Calls that went well, by name."""
        well = Counter(
            name
            for client, request, name in self.sent
            if request in client.replies and not client.replies[request].code
        )
        return dict(sorted(well.items()))


if __name__ == "__main__":
    agents = Agents(int(sys.argv[1]), sys.argv[3])
    print(json.dumps({"digest": agents.run(int(sys.argv[2])), "steps": len(agents.system.log), "done": agents.done()}))
