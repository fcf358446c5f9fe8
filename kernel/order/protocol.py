"""What a scheduling policy is to the kernel: a function from plain facts of a waiting job to its key.

The smaller the key, the sooner the job gets frames and its share of the next pass.  A policy never holds kernel objects,
reads no clock and draws no random number.  It may be wrong: `line.Line` serves a job that was overtaken often enough
before all others, whatever the policy says, so a policy can make a job slow but cannot make it starve.

Two jobs that a policy finds equal go by place: arrival, and a step of nice is worth params.NICE_JOBS arrivals.  A policy
whose key is a quantity (tokens, time) multiplies it by `stretch(nice)`, so that nice means something under each.
"""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple

NICE_STEP: Final = 1.25  # what a step of nice multiplies a quantity by; that of Linux's scheduler


class Waiting(NamedTuple):
    """What is known of one job that has something to compute before it decodes.

    order        arrival, the smaller, the older; a preempted job keeps it
    place        order, shifted by nice: the order among equals, and what "later" means in bounds
    nice         -20 (first) .. 19
    program      number of its program, which is its process
    birth        order of the first job of that program
    served       service that the program has attained: tokens computed for it, prompt and answer, hits left out
    left         tokens of its prompt that nobody has: it would compute them
    resident     tokens of its prompt that are in hbm now
    arriving     tokens after them that are on their way into hbm
    awaited      tokens after those that a running prefill computes and is about to publish
    stored       tokens after those that a slower tier has
    waited_ns    since it arrived
    since_ns     when it arrived, on the kernel's clock
    due_ns       when its first token is wanted (generate's ttft_ms), on that clock; 0: nobody said
    token_ns     how long a token after it may take (tpot_ms); 0: nobody said
    passed       later jobs that were begun before it (line.py); within its group
    admitted     it has its frames
    begun        it has sampled: it decoded and lost its frames

    resident, arriving, awaited and stored are 0 for policies that do not look (`OrderPolicy.looks`); then `left` counts all
    that the job itself has not computed.  served is 0 for those that do not ask for it (`OrderPolicy.attains`).
    """

    order: int
    place: int
    nice: int
    program: int
    birth: int
    served: int
    left: int
    resident: int
    arriving: int
    awaited: int
    stored: int
    waited_ns: int
    since_ns: int
    due_ns: int
    token_ns: int
    passed: int
    admitted: bool
    begun: bool


class Forecast(NamedTuple):
    """What the kernel expects of a job that asks to be taken, in ns.  0: nothing has been measured yet.

    first_ns   until its first token, behind all that the policy puts before it
    token_ns   of a pass in which it decodes with those that decode now
    free_ns    until the first of those that decode must be done
    """

    first_ns: int
    token_ns: int
    free_ns: int


Key = tuple[float, ...]


class OrderPolicy:
    """Chosen by name with `sysctl sched.policy`; third parties register the entry point group `attnix.scheduling`.  One
    instance per compute device.

    looks     it wants to know what is resident, arriving, awaited, stored
    attains   it wants to know what its program has had (`Waiting.served`): that is a sum over the program's contexts
    plain     its order is that of `Waiting.place`: no fact is read for it
    refuses   `late_ns` is asked before a generation with a target is taken
    """

    name: ClassVar[str]
    looks: ClassVar[bool] = False
    attains: ClassVar[bool] = False
    plain: ClassVar[bool] = False
    refuses: ClassVar[bool] = False

    def key(self, job: Waiting) -> Key:
        """The smaller, the sooner.  Called in the middle of planning a pass: a microsecond or two."""
        raise NotImplementedError

    def late_ns(self, job: Waiting, forecast: Forecast) -> int:
        """0: take it.  Otherwise it is refused with EAGAIN, and told to try again after so long."""
        return 0


def stretch(nice: int) -> float:
    """Weight of a quantity of a job with that nice value."""
    return float(NICE_STEP**nice)
