"""Random lives of named contexts: clients come and go, the daemon dies, generations are cut anywhere and go on.

The model beside it is a list of tokens per context and the reference of the simulated model.  Frames are few, so contexts
also lose theirs in between; fsck runs after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from attnix.drivers.sim_model import SamplingChoice, reference_tokens
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import Suspend
from attnix.simulated import SimulatedClient, ints, tokens_of

from .test_names import Durable

SESSIONS = 3
WINDOW = 64


@dataclass
class Life:
    """One named context, as its client sees it."""

    name: str
    log: list[int]
    handle: int = 0
    want: int = 0  # tokens of the generation under way; 0: none
    seed: int = 0
    request: int = 0
    got: list[int] = field(default_factory=list)  # tokens of it that came before `request`

    @property
    def expected(self) -> list[int]:
        return reference_tokens(self.log, self.want, choice=SamplingChoice(temperature=1.0, seed=self.seed))


@dataclass
class Session:
    token: str = ""
    client: SimulatedClient | None = None
    lives: dict[str, Life] = field(default_factory=dict)


class NamesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.system = self.boot(None)
        self.sessions = [Session() for _ in range(SESSIONS)]
        self.made = 0

    def boot(self, system: Durable | None) -> Durable:
        return Durable(system.disk if system else None, frames=24, window_tokens=WINDOW, max_contexts=16)

    def come(self, session: Session) -> SimulatedClient:
        """The session's client, connected; everything that it kept must be there."""
        if session.client is not None:
            return session.client
        if not session.lives:
            session.client, said = self.system.join()
            session.token = said.session
            return session.client
        session.client, said = self.system.join(session.token)
        assert sorted(row.name for row in said.contexts) == sorted(session.lives)
        for row in said.contexts:
            life = session.lives[row.name]
            life.handle = row.ctx
            if life.want:
                self.go_on(session.client, life, row.generation)
            else:
                assert row.tokens == len(life.log), row
        return session.client

    def go_on(self, client: SimulatedClient, life: Life, phase: str) -> None:
        assert phase, "a generation that was begun is known"
        life.request = client.post("reattach", life.handle, ints(life.got))
        prime = self.system.primed[-1]
        assert (prime.request, prime.told) == (life.request, len(life.got))
        life.got = tokens_of(prime.tokens)

    def seen(self, session: Session, life: Life) -> list[int]:
        fresh = session.client.streamed.get(life.request, []) if session.client and life.want else []
        return life.got + fresh

    def check(self, session: Session, life: Life) -> None:
        """Take the end of a generation, if it has come."""
        client = session.client
        if client is None or not life.want or life.request not in client.replies:
            return
        result: Any = client.result(life.request)
        assert result.reason == "length"
        assert tokens_of(result.tokens) == life.expected
        assert self.seen(session, life) == life.expected, "no token lost or doubled"
        life.log += life.expected
        life.want, life.got = 0, []

    def check_all(self) -> None:
        for session in self.sessions:
            for life in session.lives.values():
                self.check(session, life)

    def leave(self, session: Session, lost: int) -> None:
        """The client's side of a broken connection: the last `lost` tokens of each stream never arrived."""
        for life in session.lives.values():
            if life.want:
                seen = self.seen(session, life)
                life.got = seen[: max(0, len(seen) - lost)]
        session.client = None

    def pick(self, number: int) -> tuple[Session, Life] | None:
        every = [(s, life) for s in self.sessions for life in s.lives.values() if not life.want]
        return every[number % len(every)] if every else None

    # -- rules ----------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, SESSIONS - 1), prompt=st.lists(st.integers(0, 5), min_size=1, max_size=12))
    def publish(self, number: int, prompt: list[int]) -> None:
        self.publish_one(number, prompt)

    def publish_one(self, number: int, prompt: list[int]) -> None:
        session = self.sessions[number]
        if sum(len(s.lives) for s in self.sessions) >= 6:
            return
        client = self.come(session)
        self.made += 1
        life = Life(f"n{self.made}", prompt)
        life.handle = client.call("alloc_context").ctx
        client.call("append", life.handle, ints(prompt))
        client.call("publish", life.handle, life.name)
        session.lives[life.name] = life
        self.check_all()

    @initialize(prompts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=3, max_size=3))
    def begin(self, prompts: list[list[int]]) -> None:
        for number, prompt in enumerate(prompts):
            self.publish_one(number, prompt)

    @rule(number=st.integers(0, 99), count=st.integers(4, 20), seed=st.integers(0, 3), passes=st.integers(0, 8))
    def generate(self, number: int, count: int, seed: int, passes: int) -> None:
        found = self.pick(number)
        if found is None or len(found[1].log) + count > WINDOW:
            return
        session, life = found
        client = self.come(session)
        if life.want:
            return
        life.want, life.seed, life.got = count, seed, []
        life.request = client.post("generate", life.handle, count, 1.0, 0, 1.0, 0.0, seed)
        self.pass_by(passes)

    def pass_by(self, passes: int) -> None:
        for _ in range(passes):
            self.system.tick()
        self.check_all()

    @rule(number=st.integers(0, 99), tokens=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def append(self, number: int, tokens: list[int]) -> None:
        found = self.pick(number)
        if found is None or len(found[1].log) + len(tokens) > WINDOW:
            return
        session, life = found
        self.come(session).call("append", life.handle, ints(tokens))
        life.log += tokens
        self.check_all()

    @rule(number=st.integers(0, 99), length=st.integers(1, 10))
    def truncate(self, number: int, length: int) -> None:
        found = self.pick(number)
        if found is None or len(found[1].log) < length:
            return
        session, life = found
        self.come(session).call("truncate", life.handle, length)
        del life.log[length:]
        self.check_all()

    @rule(number=st.integers(0, 99))
    def unlink(self, number: int) -> None:
        found = self.pick(number)
        if found is not None:
            session, life = found
            client = self.come(session)
            client.call("unlink", life.name)
            client.call("release", life.handle)
            del session.lives[life.name]

    @rule(number=st.integers(0, 99), to=st.integers(0, SESSIONS - 1))
    def hand_over(self, number: int, to: int) -> None:
        """Released by one session, opened by another."""
        found = self.pick(number)
        if found is None or found[0] is self.sessions[to]:
            return
        session, life = found
        client, other = self.come(session), self.come(self.sessions[to])
        try:
            other.call("open", life.name)
            raise AssertionError("it was held")
        except Errno as error:
            assert error.code == E.EBUSY
        client.call("release", life.handle)
        life.handle = other.call("open", life.name).ctx
        del session.lives[life.name]
        self.sessions[to].lives[life.name] = life
        self.check_all()

    @rule(passes=st.integers(1, 12))
    def tick(self, passes: int) -> None:
        self.pass_by(passes)

    @rule(number=st.integers(0, SESSIONS - 1), lost=st.integers(0, 3), passes=st.integers(0, 4))
    def disconnect(self, number: int, lost: int, passes: int) -> None:
        self.pass_by(passes)
        session = self.sessions[number]
        if session.client is not None:
            self.check_all()
            self.system.disconnect(session.client)
            self.leave(session, lost)

    @rule(number=st.integers(0, SESSIONS - 1))
    def reconnect(self, number: int) -> None:
        self.come(self.sessions[number])
        self.check_all()

    @rule(lost=st.integers(0, 3), orderly=st.booleans(), passes=st.integers(0, 4))
    def crash(self, lost: int, orderly: bool, passes: int) -> None:
        self.pass_by(passes)
        if orderly:
            self.system.step(Suspend())
        for session in self.sessions:
            self.leave(session, lost)
        self.system = self.boot(self.system)

    @precondition(lambda self: not any(life.want for s in self.sessions for life in s.lives.values()))
    @rule()
    def journal_agrees(self) -> None:
        """What is on the disk is what the clients believe."""
        self.system.run()
        on_disk = {r.name: tokens_of(self.system.disk.logs[cid]) for cid, r in self.system.disk.records.items()}
        assert on_disk == {life.name: life.log for s in self.sessions for life in s.lives.values()}

    def teardown(self) -> None:
        for session in self.sessions:
            self.come(session)
        self.system.run()
        self.check_all()
        assert not any(life.want for s in self.sessions for life in s.lives.values()), (
            "every generation came to its end"
        )
        self.journal_agrees()
        for session in self.sessions:
            for life in session.lives.values():
                client = self.come(session)
                client.call("unlink", life.name)
            if session.client is not None:
                self.system.disconnect(session.client)
        self.system.run()
        assert not self.system.kernel.machine.contexts and not self.system.disk.records
        assert self.system.available() == 24
        assert not self.system.double_replies


TestNamesMachine = NamesMachine.TestCase
