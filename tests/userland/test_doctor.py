"""`attnix doctor` against a daemon, and the machine with everything wrong at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attnix.study_doctor import Row, Service, run, treated
from attnix.syscalls import Client, connect
from attnix.userland.doctor.finding import Finding

from .conftest import Attnix, Serve

PROMPT = "You are a helpful assistant who answers in one sentence, and asks back when a question is unclear. "


def ask(socket: str, prompts: list[str]) -> None:
    with connect(socket) as system:
        for prompt in prompts:
            context = system.alloc_context()
            context.append(text=prompt)
            context.generate(max_tokens=2)


def test_request_ids_in_front_are_told_with_status_1(attnix: Attnix, serve: Serve) -> None:
    socket = serve(frames=200, window_tokens=1024)
    ask(socket, [f"[request {number:04d}] {PROMPT}Question {number}?" for number in range(5)])
    said = attnix("doctor", "--json")
    assert (said.status, said.err) == (1, "")
    (finding,) = said.json["findings"]
    assert (finding["name"], said.json["healthy"]) == ("heads", False)
    # From "000", which all have in common: a digit that differs, then the rest up to the question's number.
    assert finding["numbers"]["tokens_same"] == len(f"] {PROMPT}Question ")
    assert finding["numbers"]["tokens_common"] == len("[request 000")
    people = attnix("doctor")
    assert people.status == 1
    assert people.out.splitlines()[0].startswith("1 finding, the worst first")
    assert "-> Put what changes" in people.out


def test_a_dump_tells_what_was_wrong_when_the_system_is_gone(attnix: Attnix, serve: Serve, tmp_path: Path) -> None:
    """The ids again, and a tool whose caller is always wrong about it.  Without --text nobody knows what prompts began with."""
    socket = serve(frames=200, window_tokens=1024)
    ask(socket, [f"[request {number:04d}] {PROMPT}Question {number}?" for number in range(5)])
    with connect(socket) as system:
        context = system.alloc_context()
        context.append(text="weather?")
        context.generate(max_tokens=1)
        for _ in range(8):
            context.resume(text="!", wait=context.wait_tool("weather", eta=60.0).wait)
    whole, bare = str(tmp_path / "whole.json"), str(tmp_path / "bare.json")
    live = attnix("doctor", "--json")
    assert attnix("dump", "--text", whole).status == attnix("dump", bare).status == 0
    assert attnix("shutdown").status == 0
    said = attnix("doctor", "--json", "--from", whole)
    assert (said.status, said.err) == (1, "")
    assert [finding["name"] for finding in said.json["findings"]] == ["heads", "eta"]
    assert said.json["unseen"] == []
    assert said.json["findings"] == live.json["findings"]
    common = " ".join(map(str, b"[request 000"))  # a token is a byte
    assert attnix("doctor", "--from", whole).out.count(f": {common} »") == 2, "the two heads, side by side"
    said = attnix("doctor", "--json", "--from", bare)
    assert (said.status, [finding["name"] for finding in said.json["findings"]]) == (1, ["eta"])
    assert "without `attnix dump --text`" in said.json["unseen"][0]
    assert attnix("doctor", "--from", bare).out.splitlines()[-1].startswith("not looked at: this dump")


def test_the_same_with_the_id_at_the_end_is_healthy(attnix: Attnix, serve: Serve) -> None:
    socket = serve(frames=200, window_tokens=1024)
    ask(socket, [f"{PROMPT}Question {number}? [request {number:04d}]" for number in range(5)])
    said = attnix("doctor", "--json")
    assert (said.status, said.json["findings"], said.json["healthy"]) == (0, [], True)
    assert "nothing is wrong" in attnix("doctor").out


def test_what_only_the_daemons_user_may_see_is_not_called_healthy(
    attnix: Attnix, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(frames=16)
    health = Client.health
    monkeypatch.setattr(Client, "health", lambda system, *args: health(system, *args)._replace(samples=()))
    said = attnix("doctor")
    assert said.status == 0 and "not looked at: what the machine did" in said.out


def test_without_a_daemon_it_could_not_look(attnix: Attnix, nobody: str) -> None:
    said = attnix("doctor", "--json")
    assert said.status == 3
    assert "attnix boot" in said.json["error"]["message"]
    assert said.json["error"]["kind"] == "connection"


@pytest.fixture(scope="module")
def treatment() -> tuple[Row, list[Finding], Row, list[Finding]]:
    """128 requests to the machine as it was; and again when all remedies have been taken as they were given."""
    service = Service(requests=128).as_tuned_on_an_empty_cache()
    settings = service.sysctl()
    before, _, found = run("before", service, settings)
    for finding in found:
        service, settings = treated(service, settings, finding)
    after, _, left = run("after", service, settings)
    return before, found, after, left


@pytest.mark.slow
def test_the_joint_scenario_is_named_whole_in_order_of_damage(
    treatment: tuple[Row, list[Finding], Row, list[Finding]],
) -> None:
    before, found, _, _ = treatment
    assert {finding.name for finding in found} == {"heads", "thrashing", "block_size", "concurrency"}
    assert [f.damage for f in found] == sorted((f.damage for f in found), reverse=True)
    assert before.used > 0.97
    assert before.preemptions >= 20
    named = {finding.name: finding for finding in found}
    # 1,000 shared tokens and 3 of the template are 7 whole blocks of 128; all but the first of those asked by then lost them.
    lost = named["heads"].numbers
    assert lost["tokens_lost"] == int(lost["prompts_lost"]) * 7 * 128
    assert int(lost["prompts_lost"]) >= 0.9 * int(lost["prompts"])
    # 576 frames: 57 prompts of 10 blocks, as he had found on an empty cache; 64 with his average of 1,150 tokens, which is 9.
    assert named["concurrency"].numbers["max_admitted"] == 576 // -(-1150 // 128) == 64
    assert int(named["concurrency"].numbers["fits"]) < 50


@pytest.mark.slow
def test_its_remedies_are_worth_what_they_are_said_to_be(
    treatment: tuple[Row, list[Finding], Row, list[Finding]],
) -> None:
    before, _, after, left = treatment
    assert left == []
    assert after.preemptions == 0
    assert after.ttft_p50_s < before.ttft_p50_s / 3
    assert after.ttft_p99_s < before.ttft_p99_s / 10
    assert after.pause_max_s < before.pause_max_s / 50  # the longest time between two tokens of any answer
    assert after.pause_p90_s < before.pause_p90_s / 50
    assert after.computed_tokens < before.computed_tokens / 2


@pytest.mark.slow
def test_control_the_same_machine_with_nothing_wrong_is_healthy() -> None:
    service = replace(Service(requests=128), block_tokens=16, id_first=False, guarded=True)
    _, _, found = run("healthy", service, service.sysctl())
    assert found == []
