"""Groups: who is charged for which frame, what limits hold back, what guarantees leave alone.

Frames hold 4 tokens here, so a context of 4 n tokens is n frames, and one of 4 n + 1 is n + 1.
"""

from __future__ import annotations

from typing import Any

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel import domain
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.params import MAX_GROUPS
from attnix.kernel.twin import TwinCore
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

SECOND = 1_000_000_000


@pytest.fixture(params=[TwinCore, Core])
def system(request: pytest.FixtureRequest) -> SimulatedSystem:
    return SimulatedSystem(frames=12, block_tokens=4, window_tokens=64, core=request.param)


def used(system: SimulatedSystem, group: str, device: int = 0) -> int:
    found = system.kernel.machine.groups.find(group)
    return system.core.account(device, found.number).used if found is not None else 0


def context(client: SimulatedClient, tokens: int, first: int = 0, pid: int = 0, domain: str = "") -> int:
    """A computed context with a log of its own."""
    ctx: int = client.call("alloc_context", pid, "", domain).ctx
    client.call("append", ctx, ints(range(first, first + tokens)))
    client.system.run()
    return ctx


def spawn(client: SimulatedClient, group: str) -> int:
    pid: int = client.call("spawn", "", 0, 0, group).pid
    return pid


def limit(client: SimulatedClient, group: str, resource: str, hard: int = -1, soft: int = -1) -> Any:
    return client.call("setlimit", group, resource, soft, hard)


def refused(client: SimulatedClient, code: E, name: str, *args: object) -> Errno:
    with pytest.raises(Errno) as error:
        client.call(name, *args)
    assert error.value.code is code, error.value
    return error.value


# -- who pays -------------------------------------------------------------------------------------------------------


def test_a_frame_is_charged_to_the_group_that_first_needed_it(system: SimulatedSystem) -> None:
    client = system.connect(1000)
    context(client, 9)  # two whole blocks and a tail
    assert used(system, "uid:1000") == 3
    context(client, 9, pid=spawn(client, "uid:1000/b"))  # shares the two, and has a tail of its own
    assert (used(system, "uid:1000"), used(system, "uid:1000/b")) == (4, 1)  # what a sub-group uses counts above it too
    assert used(system, "uid:1001") == 0


def test_what_is_left_of_a_group_pays_when_it_goes(system: SimulatedSystem) -> None:
    """Its cache stays charged until it is evicted, and then the group is gone."""
    client, other = system.connect(1000), system.connect(1001)
    client.call("release", context(client, 8))
    system.disconnect(client)
    assert used(system, "uid:1000") == 2
    context(other, 48)
    assert used(system, "uid:1000") == 0
    root = system.connect(0)
    assert [row.name for row in root.call("groups").rows] == ["uid:0", "uid:1001"]


def test_a_group_gets_below_its_limit_by_letting_go_of_its_own(system: SimulatedSystem) -> None:
    """What it computed first and another maps is charged to that other once the group has nothing else to give."""
    client = system.connect(1000)
    a, b = spawn(client, "uid:1000/a"), spawn(client, "uid:1000/b")
    limit(client, "uid:1000/a", "hbm", 3)
    limit(client, "uid:1000/b", "hbm", 8)
    mine = context(client, 12, pid=a)
    context(client, 12, pid=b)  # the same three blocks
    assert (used(system, "uid:1000/a"), used(system, "uid:1000/b")) == (3, 0)
    client.call("release", mine)
    context(client, 12, first=100, pid=a)
    assert (used(system, "uid:1000/a"), used(system, "uid:1000/b")) == (3, 3)


def test_the_heir_has_no_room_and_what_contains_it_pays(system: SimulatedSystem) -> None:
    client = system.connect(1000)
    a, b = spawn(client, "uid:1000/a"), spawn(client, "uid:1000/b")
    limit(client, "uid:1000/a", "hbm", 3)
    limit(client, "uid:1000/b", "hbm", 1)
    mine = context(client, 4, pid=a)
    client.call("append", mine, ints(range(4, 8)))
    system.run()
    context(client, 4, pid=b)  # shares the first: nothing to pay
    context(client, 4, first=50, pid=b)  # its limit
    client.call("release", mine)
    context(client, 12, first=100, pid=a)
    assert (used(system, "uid:1000/a"), used(system, "uid:1000/b"), used(system, "uid:1000")) == (3, 1, 5)


# -- hard -----------------------------------------------------------------------------------------------------------


def test_a_group_at_its_limit_makes_room_among_its_own(system: SimulatedSystem) -> None:
    client, other = system.connect(1000), system.connect(1001)
    limit(client, "uid:1000", "hbm", 4)
    theirs = context(other, 8, first=200)
    mine = context(client, 8)
    context(client, 12, first=100)  # the idle context of the same group goes, though the pool has free frames
    assert used(system, "uid:1000") <= 4 and used(system, "uid:1001") == 2
    assert other.call("stat", theirs).blocks == 2 and client.call("stat", mine).blocks == 0
    assert system.core.free_frames(0) >= 6


def test_a_group_at_its_limit_holds_up_nobody_else(system: SimulatedSystem) -> None:
    client, other = system.connect(1001), system.connect(1002)
    limit(system.connect(1000), "uid:1001", "hbm", 3)
    running = context(client, 8)
    client.post("generate", running, 4)
    system.tick()
    late = client.call("alloc_context").ctx
    client.post("append", late, ints(range(100, 112)))  # has to wait for the generation
    theirs = other.call("alloc_context").ctx
    other.post("append", theirs, ints(range(200, 212)))
    system.tick()
    system.tick()
    assert other.call("stat", theirs).cached_tokens == 12
    system.run()
    assert client.call("stat", late).cached_tokens == 12


def test_a_job_that_can_never_fit_is_refused_with_both_numbers(system: SimulatedSystem) -> None:
    client = system.connect(1001)
    limit(system.connect(1000), "uid:1001", "hbm", 3)
    ctx = client.call("alloc_context").ctx
    error = refused(client, E.EDQUOT, "append", ctx, ints(range(13)))
    assert (error.detail["wanted"], error.detail["limit"], error.detail["used"]) == (13, 12, 0)
    assert error.detail["group"] == "uid:1001" and "attnix group set" in str(error.detail["message"])
    client.call("append", ctx, ints(range(12)))


def test_a_generation_ends_with_its_groups_limit_as_with_the_pools_end(system: SimulatedSystem) -> None:
    client = system.connect(1001)
    limit(system.connect(1000), "uid:1001", "hbm", 3)
    result = client.call("generate", context(client, 6), 40)
    assert result.reason == "length" and tokens_of(result.tokens) == reference_tokens(list(range(6)), 7)  # 12 and one


def test_a_limit_that_came_later_ends_the_job_not_the_system(system: SimulatedSystem) -> None:
    """A context larger than the new limit of its group: idle it gives way, and running it again is refused."""
    client, owner = system.connect(1001), system.connect(1000)
    large = context(client, 20)
    limit(owner, "uid:1001", "hbm", 3)
    assert used(system, "uid:1001") <= 3
    error = refused(client, E.EDQUOT, "generate", large, 4)
    assert (error.detail["wanted"], error.detail["limit"]) == (20, 12)
    limit(owner, "uid:1001", "hbm", 0)
    assert client.call("generate", large, 4).reason == "length"


def test_a_limit_below_what_runs_is_refused_and_changes_nothing(system: SimulatedSystem) -> None:
    client, owner = system.connect(1001), system.connect(1000)
    client.post("generate", context(client, 20), 8)
    system.tick()
    error = refused(owner, E.EBUSY, "setlimit", "uid:1001", "hbm", -1, 3)
    assert error.detail["used"] in (5, 6) and error.detail["limit"] == 3
    assert owner.call("groups", "uid:1001").rows[0].limits[0].hard == 0


def test_the_newest_job_of_a_group_at_its_limit_gives_way(system: SimulatedSystem) -> None:
    """Two generations grow into a limit that has room for one: both end as if alone, one after the other."""
    client, owner = system.connect(1001), system.connect(1000)
    prompts = [list(range(8)), list(range(50, 58))]
    contexts = [context(client, 8, first=p[0]) for p in prompts]
    limit(owner, "uid:1001", "hbm", 5)
    requests = [client.post("generate", ctx, 11) for ctx in contexts]
    system.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert tokens_of(client.result(request).tokens) == reference_tokens(prompt, 11)
    assert system.kernel.machine.counters["preemptions"] > 0


def test_contexts_are_counted_all_or_none(system: SimulatedSystem) -> None:
    client, owner = system.connect(1001), system.connect(1000)
    limit(owner, "uid:1001", "contexts", 3)
    ctx = context(client, 4)
    error = refused(client, E.EDQUOT, "fork", ctx, 3)
    assert (error.detail["wanted"], error.detail["used"], error.detail["limit"]) == (3, 1, 3)
    assert len(client.call("fork", ctx, 2).ctxs) == 2
    refused(client, E.EDQUOT, "alloc_context")
    refused(client, E.EDQUOT, "spawn", "", 0, ctx)
    refused(client, E.EDQUOT, "score", ctx, ints([1]))  # runs on a scratch fork
    client.call("publish", ctx, "kept")
    refused(client, E.EDQUOT, "open", "kept", True)
    client.call("release", ctx)  # published: it stays, and counts
    refused(client, E.EDQUOT, "alloc_context")
    client.call("unlink", "kept")
    client.call("alloc_context")
    refused(owner, E.EBUSY, "setlimit", "uid:1001", "contexts", -1, 2)


def test_a_sub_group_is_limited_within_its_uid(system: SimulatedSystem) -> None:
    client, owner = system.connect(1001), system.connect(1000)
    limit(owner, "uid:1001", "hbm", 4)
    limit(client, "uid:1001/a", "hbm", 10)  # allowed, and of no use
    pid = spawn(client, "uid:1001/a")
    ctx = client.call("alloc_context", pid).ctx
    assert refused(client, E.EDQUOT, "append", ctx, ints(range(17))).detail["group"] == "uid:1001"
    client.call("append", ctx, ints(range(16)))
    system.run()
    context(client, 8, first=100)  # the uid's own: the sub-group's idle context goes
    assert used(system, "uid:1001") <= 4


# -- who may --------------------------------------------------------------------------------------------------------


def test_who_may_set_and_see_what(system: SimulatedSystem) -> None:
    client, owner, root = system.connect(1001), system.connect(1000), system.connect(0)
    refused(client, E.EACCES, "setlimit", "uid:1001", "hbm", -1, 3)
    refused(client, E.EACCES, "setlimit", "uid:1002/a", "hbm", -1, 3)
    limit(client, "uid:1001/a", "hbm", 3)
    limit(root, "uid:1001", "hbm", 8)
    refused(client, E.EACCES, "groups", "uid:1000")
    refused(client, E.EACCES, "spawn", "", 0, 0, "uid:1000/x")
    assert [row.name for row in client.call("groups").rows] == ["uid:1001", "uid:1001/a"]
    names = [row.name for row in owner.call("groups").rows]
    assert names == ["uid:0", "uid:1000", "uid:1001", "uid:1001/a"]
    refused(client, E.ENOENT, "groups", "uid:1001/never")
    for name in (
        "uid:01",
        "uid:-1",
        "uid:x",
        "1001",
        "uid:1001/",
        "uid:1001/a/b",
        "uid:1001/" + "x" * 60,
        "uid:1001/\n",
    ):
        refused(root, E.EINVAL, "setlimit", name, "hbm", -1, 3)


def test_limits_that_make_no_sense(system: SimulatedSystem) -> None:
    owner = system.connect(1000)
    for resource, soft, hard in (
        ("disk", -1, 3), ("hbm", 5, 3), ("hbm", -2, 3), ("contexts", 6, 5), ("tokens_s", 6, 5), ("contexts", 33, -1), ("weight", 1, 5),
        ("weight", -1, 10_001), ("hbm", -1, 1 << 31),
    ):  # fmt: skip
        refused(owner, E.EINVAL, "setlimit", "uid:1000", resource, soft, hard)
    row = limit(owner, "uid:1000", "weight", 300)
    assert row.weight == 300 and limit(owner, "uid:1000", "weight", 0).weight == 100


def test_guarantees_are_not_promised_twice(system: SimulatedSystem) -> None:
    owner = system.connect(1000)
    limit(owner, "uid:1000", "hbm", soft=8)
    error = refused(owner, E.EINVAL, "setlimit", "uid:1001", "hbm", 5, -1)
    assert (error.detail["wanted"], error.detail["guaranteed"], error.detail["limit"]) == (5, 8, 12)
    limit(owner, "uid:1001", "hbm", soft=4)
    limit(owner, "uid:1001", "hbm", soft=2)


# -- soft -----------------------------------------------------------------------------------------------------------


def test_what_is_guaranteed_is_not_evicted_for_others(system: SimulatedSystem) -> None:
    client, other, owner = system.connect(1001), system.connect(1002), system.connect(1000)
    client.call("release", context(client, 24))  # six frames of cache, the oldest there is
    limit(owner, "uid:1001", "hbm", soft=4)
    for k in range(3):
        context(other, 28, first=100 + 40 * k)
    assert used(system, "uid:1001") == 4
    assert client.call("stat", context(client, 16)).usage.hit_tokens == 16  # and it is still what comes first


def test_without_the_guarantee_it_would_be(system: SimulatedSystem) -> None:
    client, other = system.connect(1001), system.connect(1002)
    client.call("release", context(client, 24))
    for k in range(3):
        context(other, 28, first=100 + 40 * k)
    assert used(system, "uid:1001") == 0


def test_a_guaranteed_context_is_not_preempted_for_others(system: SimulatedSystem) -> None:
    """A greedy generation grows until nothing but what is guaranteed is left: it gives way itself."""
    chat, greedy, owner = system.connect(1001), system.connect(1002), system.connect(1000)
    limit(owner, "uid:1001", "hbm", soft=6)
    first = greedy.post("generate", context(greedy, 8, first=100), 30)  # the older of the two
    system.tick()
    second = chat.post("generate", context(chat, 12), 11)
    system.run()
    assert tokens_of(chat.result(second).tokens) == reference_tokens(list(range(12)), 11)
    ps = chat.call("getrusage")
    assert ps.preemptions == 0 and ps.recomputed_tokens == 0
    got = tokens_of(greedy.result(first).tokens)
    assert got == reference_tokens(list(range(100, 108)), 30)[: len(got)]


@pytest.mark.parametrize("soft", [0, 6])
@pytest.mark.parametrize("says", ["that it waits", "nothing yet"])
def test_what_a_group_is_guaranteed_waits_for_no_keep_of_another(system: SimulatedSystem, says: str, soft: int) -> None:
    """Of 12 frames 8 are of a context whose tool is at work, or whose turn has just ended, and 1 of one that decodes."""
    one, other = system.connect(1000), system.connect(1001)
    limit(one, "uid:1001", "hbm", soft=soft)
    one.call("sysctl", "wait.policy", "ttl")
    one.call("sysctl", "wait.grace_ms", 60_000)
    said = context(one, 1)
    one.call("wait_tool", said, "grep")  # its clients say when they wait
    one.call("release", said)
    kept, decodes = context(one, 31), context(one, 2, 100)
    one.post("generate", decodes, 40)
    one.call("generate", kept, 1)
    if says == "that it waits":
        one.call("wait_tool", kept, "grep")
    assert used(system, "uid:1000") == 8 + 1
    asked = other.call("alloc_context").ctx
    other.post("append", asked, ints(range(50, 70)))
    for _ in range(2):
        system.tick()
    assert used(system, "uid:1001") == (5 if soft else 0), "at once; who is promised nothing waits for what runs"


def test_a_long_keep_holds_up_its_own_user_only(system: SimulatedSystem) -> None:
    """It would take 8 s to compute 31 tokens again, so they are kept for so long; another user waits for `wait.ttl_ms` of it."""
    one, other = system.connect(1000), system.connect(1001)
    one.call("sysctl", "wait.policy", "cost")
    one.call("sysctl", "wait.ttl_ms", 100)
    for n, c in ((4, 0), (8, 16), (16, 32), (32, 0), (2, 50)) * 100:
        system.kernel.machine.costs.prefill[0].seen(n, n * (c + n / 2), SECOND // 4 * n)
    kept, decodes, mine = context(one, 31), context(one, 2, 100), one.call("alloc_context").ctx
    one.post("generate", decodes, 40)
    one.call("wait_tool", kept, "grep")
    theirs = other.call("alloc_context").ctx
    other.post("append", theirs, ints(range(50, 70)))
    one.post("append", mine, ints(range(150, 170)))
    system.tick()
    assert used(system, "uid:1001") == 0
    system.advance(SECOND // 10)
    system.tick()
    assert used(system, "uid:1001") == 5
    assert used(system, "uid:1000") < 8 + 1


def test_a_job_that_only_guaranteed_frames_could_hold_is_refused(system: SimulatedSystem) -> None:
    client, other, owner = system.connect(1001), system.connect(1002), system.connect(1000)
    limit(owner, "uid:1001", "hbm", soft=8)
    context(client, 32)
    ctx = other.call("alloc_context").ctx
    other.call("append", ctx, ints(range(100, 124)))
    error = refused(other, E.ENOMEM, "generate", ctx, 1)
    assert error.detail["wanted"] == 6 and error.detail["free"] == 4 and "guarantee" in str(error.detail["message"])
    assert used(system, "uid:1001") == 8
    limit(owner, "uid:1001", "hbm", soft=6)
    assert other.call("generate", ctx, 1).reason == "length"


def test_what_a_job_shares_is_not_what_could_go_for_it(system: SimulatedSystem) -> None:
    """3 of its 9 frames are cache that it would share, 4 more are guaranteed to others, 5 are free: the core said that what is
    missing could be evicted, the pager that it could not, and they went on like that for ever."""
    owner, quiet = system.connect(1000), system.connect(1001)
    limit(owner, "uid:1001", "hbm", soft=4)
    quiet.call("release", context(quiet, 16))
    owner.call("release", context(owner, 12, first=100))
    ctx = owner.call("alloc_context").ctx
    owner.call("append", ctx, ints(range(100, 136)))
    error = refused(owner, E.ENOMEM, "generate", ctx, 1)
    assert (error.detail["wanted"], error.detail["free"], error.detail["reclaimable"]) == (9, 5, 7)
    assert used(system, "uid:1001") == 4


@pytest.mark.parametrize("core", [TwinCore, Core])
@pytest.mark.parametrize(("group", "soft", "hard"), [("uid:1001", 1, 0), ("uid:1000", 0, 4)])
def test_frames_that_are_being_copied_out_are_waited_for(core: Any, group: str, soft: int, hard: int) -> None:
    """Who finds no room but for what is under I/O is not refused: it comes back."""
    system = SimulatedSystem(frames=6, dram=12, block_tokens=4, window_tokens=64, core=core)
    owner, quiet = system.connect(1000), system.connect(1001)
    context(quiet, 4)
    ctx = context(owner, 16, first=100)
    limit(owner, group, "hbm", soft=soft, hard=hard)
    owner.post("demote", ctx, "dram")
    owner.post("release", ctx)
    assert system.available() == 1, "its frames are wired"
    other = owner.call("alloc_context").ctx
    prompt = list(range(50, 66))
    owner.post("append", other, ints(prompt))
    request = owner.post("generate", other, 1)
    system.run()
    assert tokens_of(owner.result(request).tokens) == reference_tokens(prompt, 1)


def test_who_waits_goes_on_when_a_generation_has_grown_into_all_that_is_not_guaranteed(system: SimulatedSystem) -> None:
    """It ended while the next pass was planned, nothing else could run, and nobody looked again at who waited."""
    owner, quiet, late = (system.connect(uid) for uid in (1000, 1001, 1002))
    context(quiet, 16)
    limit(owner, "uid:1001", "hbm", soft=4)
    ctx = context(owner, 20, first=100)
    request = owner.post("generate", ctx, 40)
    other = late.call("alloc_context").ctx
    prompt = list(range(50, 62))
    late.post("append", other, ints(prompt))  # 3 frames, while the generation has 5 of 8 and leaves one
    answer = late.post("generate", other, 3)
    system.run()
    assert owner.result(request).reason == "length" and owner.result(request).tokens_total == 33
    assert tokens_of(late.result(answer).tokens) == reference_tokens(prompt, 3)


# -- tokens per second ----------------------------------------------------------------------------------------------


def test_a_group_over_its_rate_is_held_back_and_goes_on(system: SimulatedSystem) -> None:
    client, other, owner = system.connect(1001), system.connect(1002), system.connect(1000)
    limit(owner, "uid:1001", "tokens_s", 10)
    ctx = context(client, 8)
    began_ns = system.now_ns
    request = client.post("generate", ctx, 30)
    system.run()
    assert request not in client.replies  # held, not refused; everybody else goes on
    assert other.call("generate", context(other, 8, first=99), 5).reason == "length"
    while request not in client.replies:
        assert system.timers, "nothing would wake it"
        system.advance(SECOND // 10)
        system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(list(range(8)), 30)
    # 8 of the prompt, its last again, 29 more: 38 tokens at 10 a second, with one second's worth to begin with
    assert system.now_ns - began_ns == pytest.approx(2.8 * SECOND, abs=0.2 * SECOND)
    row = owner.call("groups", "uid:1001").rows[0]
    assert row.served_tokens == 38 and row.throttled > 0
    limit(owner, "uid:1001", "tokens_s", 0)


def test_a_rate_that_is_lifted_lets_go_at_once(system: SimulatedSystem) -> None:
    client, owner = system.connect(1001), system.connect(1000)
    ctx = context(client, 8)
    limit(owner, "uid:1001", "tokens_s", 1)
    request = client.post("generate", ctx, 20)
    system.run()
    assert request not in client.replies
    limit(owner, "uid:1001", "tokens_s", 0)
    system.run()
    assert client.result(request).reason == "length"


def test_tokens_of_the_last_second_are_shown_where_they_are_promised(system: SimulatedSystem) -> None:
    client, owner = system.connect(1001), system.connect(1000)
    limit(owner, "uid:1001", "tokens_s", soft=100)
    context(client, 30)
    (row,) = [r for r in owner.call("groups", "uid:1001").rows[0].limits if r.resource == "tokens_s"]
    assert (row.used, row.soft, row.hard) == (30, 100, 0)
    limit(owner, "uid:1001", "tokens_s", soft=0)
    assert owner.call("groups", "uid:1001").rows[0].limits[4][1:] == (0, 0, 0)


# -- contexts that are promised -------------------------------------------------------------------------------------


def test_context_slots_that_are_guaranteed_are_left_free(system: SimulatedSystem) -> None:
    system = SimulatedSystem(frames=12, max_contexts=6, core=type(system.core))
    client, other, owner = system.connect(1001), system.connect(1002), system.connect(1000)
    limit(owner, "uid:1001", "contexts", soft=3)
    error = refused(owner, E.EINVAL, "setlimit", "uid:1002", "contexts", 4, -1)
    assert (error.detail["wanted"], error.detail["guaranteed"], error.detail["limit"]) == (4, 3, 6)
    theirs = [context(other, 4, first=50 * k) for k in range(3)]
    for name, args in (
        ("alloc_context", ()),
        ("fork", (theirs[0], 1)),
        ("score", (theirs[0], ints([1]))),
        ("spawn", ("x", 0, theirs[0])),
    ):
        error = refused(other, E.ENOMEM, name, *args)
        assert (error.detail["wanted"], error.detail["free"], error.detail["limit"]) == (1, 0, 6)
    mine = [context(client, 4, first=50 * k) for k in range(3)]
    refused(client, E.ENOMEM, "alloc_context")  # none is left, and it has what it was promised
    client.call("release", mine[0])
    refused(other, E.ENOMEM, "alloc_context")
    client.call("alloc_context")
    other.call("release", theirs[0])
    client.call("alloc_context")  # a guarantee is no limit
    limit(owner, "uid:1001", "contexts", soft=0)
    assert system.kernel.fsck() == []


def test_a_sub_groups_contexts_are_guaranteed_within_its_uids_limit(system: SimulatedSystem) -> None:
    client, owner = system.connect(1001), system.connect(1000)
    limit(owner, "uid:1001", "contexts", 4)
    limit(client, "uid:1001/a", "contexts", soft=3)
    refused(client, E.EINVAL, "setlimit", "uid:1001/b", "contexts", 2, -1)
    context(client, 4)
    error = refused(client, E.EDQUOT, "alloc_context")
    assert error.detail["limit"] == 4 and "3 are guaranteed" in str(error.detail["message"])
    pid = spawn(client, "uid:1001/a")
    for k in range(3):
        context(client, 4, first=50 * k, pid=pid)
    refused(client, E.EDQUOT, "alloc_context", pid)


# -- tiers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_demotion_obeys_the_owners_limit_below(core: Any) -> None:
    system = SimulatedSystem(frames=8, block_tokens=4, window_tokens=64, core=core, dram=16)
    client, owner = system.connect(1001), system.connect(1000)
    limit(owner, "uid:1001", "dram", 3)
    for k in range(4):
        client.call("release", context(client, 24, first=50 * k))
        assert used(system, "uid:1001", 1) <= 3
    assert used(system, "uid:1001", 1) > 0
    other = system.connect(1002)
    for k in range(3):
        other.call("release", context(other, 24, first=50 * k))
    assert used(system, "uid:1002", 1) > 3


# -- domains --------------------------------------------------------------------------------------------------------


def hits(client: SimulatedClient, ctx: int) -> int:
    found: int = client.call("stat", ctx).usage.hit_tokens
    return found


def test_domains_share_within_themselves_only(system: SimulatedSystem) -> None:
    """Case 2: the same tokens in every domain; no two of them share, and each shares with itself."""
    system = SimulatedSystem(frames=40, block_tokens=4, core=type(system.core))
    client, other, owner = system.connect(1001), system.connect(1002), system.connect(1000)
    owner.call("sysctl", "domain.public", "all")
    names = ["uid:1001", "uid:1001/a", "uid:1001/a|b", "uid:1001/b", "uid:1001/1", "public"]
    for name in names:
        assert hits(client, context(client, 9, domain=name)) == 0, name
    for name in names:
        assert hits(client, context(client, 9, domain=name)) == 8, name
    assert hits(other, context(other, 9)) == 0
    assert hits(other, context(other, 9, domain="public")) == 8


def test_domains_of_which_nothing_is_left_are_forgotten(
    system: SimulatedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve frames and a hundred domains, each with a block of the same tokens: none finds another's, though it may have the
    number that another had; what is in use or in the cache is found by its own as before."""
    monkeypatch.setattr(domain, "KEPT", 8)
    domains = system.kernel.machine.domains = domain.Domains(system.kernel.machine)
    client = system.connect()
    lives = context(client, 8, domain="uid:1000/lives")
    client.call("alloc_context", 0, "", "uid:1000/empty")
    for k in range(100):
        here = f"uid:1000/{k}"
        for found in (0, 4):
            ctx = context(client, 5, domain=here)
            assert client.call("stat", ctx).usage.hit_tokens == found, here
            client.call("release", ctx)
        assert len(domains) <= 2 * (12 + 2) and {"uid:1000/lives", "uid:1000/empty", here} <= domains._known.keys()
    again = context(client, 8, domain="uid:1000/lives")
    assert client.call("stat", again).usage.hit_tokens == 8 and client.call("stat", lives).shared_blocks == 2
    numbers = [number for number, _ in domains._known.values()]
    assert len(set(numbers)) == len(numbers) and max(numbers) <= 28


def test_a_fork_and_a_child_keep_their_domain(system: SimulatedSystem) -> None:
    client = system.connect(1001)
    pid = client.call("spawn", "", 0, 0, "", "uid:1001/x").pid
    ctx = context(client, 9, pid=pid)
    assert hits(client, context(client, 9, domain="uid:1001/x")) == 8
    fork = client.call("fork", ctx).ctxs[0]
    client.call("append", fork, ints(range(9, 13)))
    system.run()
    assert hits(client, context(client, 13)) == 0
    assert hits(client, context(client, 13, domain="uid:1001/x")) == 12


def test_who_may_share_with_everybody(system: SimulatedSystem) -> None:
    client, owner = system.connect(1001), system.connect(1000)
    refused(client, E.EACCES, "alloc_context", 0, "", "public")
    refused(client, E.EACCES, "alloc_context", 0, "", "uid:1002")
    refused(client, E.EINVAL, "alloc_context", 0, "", "uid:1001/a/b")
    refused(client, E.EACCES, "spawn", "", 0, 0, "", "uid:1002/x")
    owner.call("sysctl", "domain.public", "owner")
    refused(client, E.EACCES, "alloc_context", 0, "", "public")
    context(owner, 9, domain="public")
    owner.call("sysctl", "domain.public", "all")
    assert hits(client, context(client, 9, domain="public")) == 8
    refused(owner, E.EINVAL, "sysctl", "domain.public", "everyone")


def test_one_uid_does_not_see_what_another_does(system: SimulatedSystem) -> None:
    """Everything that a uid can look at is the same whether another computes a lot or nothing."""
    client, other = system.connect(1001), system.connect(1002)
    ctx = context(client, 9)

    def look() -> list[Any]:
        rows = tuple(row._replace(age_ns=0) for row in client.call("ps").processes)
        seen = [client.call(name) for name in ("tiers", "vmstat", "groups", "fsck", "getrusage", "pressure")]
        return [rows, *seen, client.call("stat", ctx), client.call("pagemap", ctx), client.call("explain", ctx)]

    before = look()
    context(other, 9)
    other.call("generate", context(other, 5, first=70), 9)
    assert look() == before
    assert system.connect(0).call("vmstat").counters["passes"] > 0  # the administrator sees all


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_what_a_tier_finds_after_a_restart_is_its_uids(core: Any) -> None:
    """Blocks of sub-domains and of `public` are found again; a uid's are charged to it, as far as its limit allows."""
    system = SimulatedSystem(frames=12, block_tokens=4, window_tokens=64, core=core, dram=12, nvme=12)
    client, owner = system.connect(1001), system.connect(1000)
    owner.call("sysctl", "domain.public", "all")
    contexts = [context(client, 8, domain=name) for name in ("uid:1001/x", "public")]
    for ctx in contexts:
        assert client.call("demote", ctx, "nvme").resident_blocks == 2
    assert used(system, "uid:1001", 2) == 4
    system.kill_driver(2)
    assert (used(system, "uid:1001", 2), system.core.reclaimable_frames(2)) == (2, 4)  # what is public is nobody's
    for name in ("uid:1001/x", "public"):
        again = context(client, 9, domain=name)
        assert client.call("stat", again).usage.nvme_tokens == 8


def test_the_log_is_for_everybody_only_while_there_is_one_user() -> None:
    system = SimulatedSystem()
    client = system.connect(uid=1001)
    assert client.call("dmesg", 0).rows
    owner = system.connect(uid=1000)
    with pytest.raises(Errno) as refused:
        client.call("dmesg", 0)
    assert refused.value.code is E.EACCES
    assert owner.call("dmesg", 0).rows
    system.disconnect(owner)  # the log still has what it did
    assert refused.value.detail["uid"] == 1000
    with pytest.raises(Errno):
        client.call("dmesg", 0)


# -- how many -------------------------------------------------------------------------------------------------------


def test_sub_groups_of_one_user_leave_room_for_others(system: SimulatedSystem) -> None:
    """One may have as many as are left for everybody else, so whoever comes finds some; what is over is made when others go."""
    system.check = False  # fsck recounts every group
    hog = system.connect(1001)
    limits = {}
    with pytest.raises(Errno) as error:
        for k in range(MAX_GROUPS):
            limits[k] = limit(hog, f"uid:1001/{k}", "contexts", 5)
    assert error.value.code is E.EAGAIN and int(error.value.detail["retry_after_ms"]) > 0
    assert len(limits) == (MAX_GROUPS - 2) // 2, "beside nobody's and its own"
    refused(hog, E.EAGAIN, "spawn", "", 0, 0, "uid:1001/more")
    limit(hog, "uid:1001/0", "contexts", 6)  # one that is there
    for uid in (1000, 1002):
        other = system.connect(uid)
        other.call("spawn", "", 0, 0, f"uid:{uid}/mine")
    for k in range(4):
        limit(hog, f"uid:1001/{k}", "contexts", 0)
    hog.call("spawn", "", 0, 0, "uid:1001/more")
