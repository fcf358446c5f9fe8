"""A machine with everything wrong at once, what the doctor says of it, and what its remedies are worth: `attnix study doctor`.

    python -m attnix.study_doctor [--requests N] [--seed N]        one JSON document on stdout

The real kernel over the timed compute device of `attnix replay`, token by token.  A service asks for answers of log-normal
length to prompts of one shared system prompt and a question.  Somebody has put a request id in front of it; has booted with
blocks of 128 tokens; and has tried, on an empty cache, how many may run at once, and turned off what would have corrected him.
Requests come in bursts, as from a job that starts many agents.  All contexts of a burst grow together: the frames fill up, and
running contexts take them from one another.

The doctor looks at the machine in the middle of the last burst, through system calls.  Then its remedies are taken as it gave
them, in its order, one more each time, and the same requests come again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from attnix.kernel import calls
from attnix.kernel.events import Effect, Event, Tokens
from attnix.replay.profile import PROFILES
from attnix.replay.workload import ANSWER_TOKENS
from attnix.study_overload import OFF, Machine, Request, Setup, lengths, quantile
from attnix.userland.doctor.examine import examine
from attnix.userland.doctor.facts import Facts, read
from attnix.userland.doctor.finding import Finding

SYSTEM_TOKENS: Final = 1000  # of the shared system prompt
ID_TOKENS: Final = 12  # of the request id, which is never the same
TEMPLATE_TOKENS: Final = 3  # in front of everything
SLOTS: Final = 2048


@dataclass(frozen=True)
class Service(Setup):
    """One way to run it.  pool_tokens: token slots in hbm, whatever the block size."""

    profile: str = "h100-8b"
    prompt_tokens: int = SYSTEM_TOKENS + 150
    output_tokens: int = 1000
    pool_tokens: int = 576 * 128
    block_tokens: int = 128
    id_first: bool = True
    burst: int = 64
    every_s: float = 24.0
    requests: int = 192
    max_admitted: int = 0
    guarded: bool = False

    @property
    def frames(self) -> int:
        return self.pool_tokens // self.block_tokens

    def as_tuned_on_an_empty_cache(self) -> Service:
        """As many at once as fit with their prompts."""
        return replace(self, max_admitted=self.frames // -(-self.prompt_tokens // self.block_tokens))

    def sysctl(self) -> dict[str, int | str]:
        return {"sched.policy": "fcfs", **({} if self.guarded else OFF), "sched.max_admitted": self.max_admitted}


class _Service(Machine):
    """It, while it runs.  gaps_ns: between two tokens of one answer; longest_ns: of them, by request."""

    def __init__(self, service: Service, settings: Mapping[str, int | str]) -> None:
        self.gaps_ns: list[int] = []
        self.longest_ns: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}
        self._asked = 0
        super().__init__(service, PROFILES[service.profile], SLOTS, settings)
        self._id_first = service.id_first
        self._draw = random.Random(f"{service.seed} questions")

    def prompt(self, request: Request) -> bytes:
        """Template, id and system prompt, in one order or the other, and a question."""
        self._asked += 1
        question = max(1, request.prompt_tokens - SYSTEM_TOKENS - ID_TOKENS - TEMPLATE_TOKENS)
        template = np.arange(TEMPLATE_TOKENS)
        shared = np.arange(1000, 1000 + SYSTEM_TOKENS)
        own = np.array([self._draw.randrange(10_000, ANSWER_TOKENS) for _ in range(ID_TOKENS + question)])
        parts = (own[:ID_TOKENS], shared) if self._id_first else (shared, own[:ID_TOKENS])
        return np.concatenate((template, *parts, own[ID_TOKENS:])).astype(np.int32).tobytes()

    def step(self, event: Event) -> list[Effect]:
        effects = super().step(event)
        for effect in effects:
            if type(effect) is Tokens:
                for request in array("q", effect.streams)[1::2]:
                    if request in self._last_ns:
                        gap_ns = self.now_ns - self._last_ns[request]
                        self.gaps_ns.append(gap_ns)
                        self.longest_ns[request] = max(gap_ns, self.longest_ns.get(request, 0))
                    self._last_ns[request] = self.now_ns
        return effects


class _Source:
    """The machine as a program sees it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def _ask(self, name: str, args: tuple[object, ...]) -> Any:
        return self._machine.call(name, args).result

    def uname(self) -> calls.UnameResult:
        found: calls.UnameResult = self._ask("uname", calls.Empty())
        return found

    def tiers(self) -> calls.TiersResult:
        found: calls.TiersResult = self._ask("tiers", calls.Empty())
        return found

    def vmstat(self) -> calls.VmstatResult:
        found: calls.VmstatResult = self._ask("vmstat", calls.Empty())
        return found

    def sysctl(self, name: str = "") -> calls.SysctlResult:
        found: calls.SysctlResult = self._ask("sysctl", calls.SysctlArgs(name))
        return found

    def health(self) -> calls.HealthResult:
        found: calls.HealthResult = self._ask("health", calls.HealthArgs())
        return found

    def pressure(self) -> calls.PressureResult:
        found: calls.PressureResult = self._ask("pressure", calls.PressureArgs())
        return found


@dataclass
class Row:
    """One way to run it.  Times in seconds; tbt: between two tokens of one answer; pause: the longest of them, per answer."""

    what: str
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    pause_p50_s: float
    pause_p90_s: float
    pause_max_s: float
    makespan_s: float
    preemptions: int
    computed_tokens: int
    used: float  # most of the frames that were mapped at once, while requests came
    findings: tuple[str, ...]


def arrivals(service: Service) -> list[Request]:
    """In bursts, all prompts of about one length and answers of log-normal length."""
    draw = random.Random(f"{service.seed} arrivals")
    made = []
    for number in range(service.requests):
        at_s = number // service.burst * service.every_s
        question = lengths(draw, service.prompt_tokens - SYSTEM_TOKENS)
        made.append(
            Request(round(at_s * 1e9), SYSTEM_TOKENS + question, round(service.output_tokens * draw.uniform(0.8, 1.2)))
        )
    return made


def run(what: str, service: Service, settings: Mapping[str, int | str]) -> tuple[Row, Facts, list[Finding]]:
    """All requests to their end; the doctor looks in the middle of the last burst."""
    machine = _Service(service, settings)
    asked = arrivals(service)
    seen: list[Facts] = []
    machine.at(asked[-1].at_ns + round(service.every_s * 5e8), lambda: seen.append(read(_Source(machine))))
    machine.run(asked)
    facts = seen[0]
    found = examine(facts)
    ttft = [s.ttft_s for s in machine.served]
    gaps, pauses = sorted(machine.gaps_ns), list(machine.longest_ns.values())
    counters = machine.kernel.machine.counters
    row = Row(
        what, quantile(ttft, 500), quantile(ttft, 990), quantile(gaps, 500) / 1e9, quantile(gaps, 990) / 1e9, quantile(pauses, 500) / 1e9,
        quantile(pauses, 900) / 1e9, max(pauses) / 1e9,
        max(s.end_ns for s in machine.served) / 1e9, counters["preemptions_running"], counters["computed_tokens"],
        facts.used_share, tuple(finding.name for finding in found),
    )  # fmt: skip
    return row, facts, found


def treated(service: Service, settings: dict[str, int | str], finding: Finding) -> tuple[Service, dict[str, int | str]]:
    """With that finding's remedy taken as it stands."""
    if finding.name == "heads":
        service = replace(service, id_first=False)
    elif finding.name == "block_size":
        service = replace(service, block_tokens=int(finding.numbers["proposed"]))
    return service, {**settings, **{name: v for name, v in finding.settings.items() if isinstance(v, int | str)}}


def study(service: Service) -> dict[str, Any]:
    """As it was; then with the doctor's remedies, one more each time; and what it says in the end."""
    service = service.as_tuned_on_an_empty_cache()
    settings = service.sysctl()
    before, facts, found = run("as it was", service, settings)
    rows = [before]
    left: list[Finding] = []
    for finding in found:
        service, settings = treated(service, settings, finding)
        row, facts, left = run(f"+ {finding.name}", service, settings)
        rows.append(row)
    again = [finding for finding in left if finding.settings]
    if again:  # what fits is another number now that contexts share and blocks are small
        for finding in again:
            service, settings = treated(service, settings, finding)
        row, facts, left = run("+ looked at again", service, settings)
        rows.append(row)
    return {
        "profile": service.profile, "requests": service.requests, "burst": service.burst,
        "service": asdict(service), "settings": settings, "frames": service.frames, "rows": [asdict(row) for row in rows],
        "findings": [asdict(finding) for finding in found], "left": [asdict(finding) for finding in left],
        "window_s": facts.window_ns / 1e9,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="attnix study doctor")
    standard = Service()
    parser.add_argument("--requests", type=int, default=standard.requests)
    parser.add_argument("--seed", type=int, default=standard.seed)
    asked = parser.parse_args(arguments)
    json.dump(study(Service(requests=asked.requests, seed=asked.seed)), sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
