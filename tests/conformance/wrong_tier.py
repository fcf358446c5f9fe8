"""A file tier with one bug, chosen by its first argument: each is a mistake that a driver's author could make."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attnix.drivers import serve as serve_module
from attnix.drivers._stored import ffi, lib
from attnix.drivers.nvme import inventory, jobs
from attnix.drivers.nvme.driver import NvmeDriver, make_backend
from attnix.drivers.nvme.engine import Operation, Verb
from attnix.drivers.nvme.slot_file import SlotFile
from attnix.drivers.serve import run_driver
from attnix.drivers.stored import Gates
from attnix.kernel.events import Transfer, TransferDone

BUGS: dict[str, Callable[[], None]] = {}
COMPLETED = NvmeDriver.completed
TRANSFER = NvmeDriver.transfer


class Library:
    """The C library with some functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)


def patch(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def bug(install: Callable[[], None]) -> Callable[[], None]:
    BUGS[install.__name__] = install
    return install


def rewrite_answers(change: Callable[[list[TransferDone]], list[TransferDone]]) -> None:
    patch(NvmeDriver, completed=lambda driver: change(COMPLETED(driver)))


@bug
def does_not_verify_the_payload() -> None:
    patch(jobs, lib=Library(ax_verify_one=lambda c, header, payload, tag: lib.ax_header_check(c, header, tag)))


@bug
def does_not_verify_what_it_reads_directly() -> None:
    patch(jobs, lib=Library(ax_compare_layers=lambda *_: 0))


@bug
def skips_the_last_layer_of_a_direct_read() -> None:
    def compare(header: Any, checksums: Any, first: int, count: int) -> int:
        return lib.ax_compare_layers(header, checksums, first, count - (first + count == 6))

    patch(jobs, lib=Library(ax_compare_layers=compare))


@bug
def ignores_the_tag() -> None:
    patch(
        jobs, lib=Library(ax_verify_one=lambda c, header, payload, tag: lib.ax_verify_one(c, header, payload, ffi.NULL))
    )


@bug
def compares_the_key_alone() -> None:
    def verify(c: Any, header: Any, payload: Any, tag: Any) -> int:
        code = lib.ax_verify_one(c, header, payload, tag)
        return 0 if code == 8 else code

    patch(jobs, lib=Library(ax_verify_one=verify))


@bug
def lets_transfers_overtake_each_other() -> None:
    def start(driver: NvmeDriver) -> None:
        for job in reversed(driver._waiting):
            (driver._writes if job.verb is Verb.WRITE else driver._reads).append(job)
        driver._waiting = deque()

    patch(NvmeDriver, _start_waiting=start)


@bug
def opens_the_gate_too_early() -> None:
    plan = jobs.DirectRead._plan

    def hasty(job: jobs.DirectRead) -> Iterator[Operation]:
        if job._gates is not None:
            job._gates.store(job.effect.gate, job.effect.ticket, job.format.layers)
            time.sleep(
                0.3
            )  # a slow file: else it may all be there before anybody has looked, and there is no mistake to see
        return plan(job)

    patch(jobs.DirectRead, _plan=hasty)


@bug
def never_says_that_a_load_failed() -> None:
    store = Gates.store
    patch(
        Gates, store=lambda gates, gate, ticket, layers: store(gates, gate, ticket, layers) if layers < 1000 else None
    )


@bug
def does_not_use_the_gate() -> None:
    patch(Gates, store=lambda *_: None)


@bug
def keeps_what_was_dropped() -> None:
    patch(NvmeDriver, drop=lambda driver, frames: None)


@bug
def finds_private_blocks() -> None:
    patch(inventory, PRIVATE=0)


@bug
def finds_nothing() -> None:
    def nothing(driver: NvmeDriver) -> Iterable[bytes]:
        return ()

    patch(NvmeDriver, inventory=nothing)


@bug
def fails_the_whole_transfer() -> None:
    done = jobs.Job.done

    def all_failed(job: jobs.Job) -> TransferDone:
        if any(job.codes):
            job.codes = [code or 5 for code in job.codes]
        return done(job)

    patch(jobs.Job, done=all_failed)


@bug
def answers_twice() -> None:
    rewrite_answers(lambda answers: [*answers, *answers[:1]])


@bug
def loses_an_answer() -> None:
    count = 0

    def lose(answers: list[TransferDone]) -> list[TransferDone]:
        nonlocal count
        count += len(answers)
        return answers[1:] if count % 20 == 0 else answers

    rewrite_answers(lose)


@bug
def writes_next_to_where_it_should() -> None:
    patch(SlotFile, offset=lambda file, slot: 4096 + (slot & ~1) * file.stored_bytes)


@bug
def leaves_its_generation_in_the_arena() -> None:
    class NoStamp(Library):
        pass

    def stamp(header: Any, generation: int) -> None:
        if generation:
            lib.ax_header_stamp(header, generation)

    patch(jobs, lib=NoStamp(ax_header_stamp=stamp))


@bug
def reads_into_the_next_frame_too() -> None:
    landed = jobs.StoredRead._landed

    def sloppy(job: jobs.StoredRead, operation: Operation) -> None:
        landed(job, operation)
        after = (job.frames[operation.item] + 1) * job.format.stored_bytes
        if after < job.arena.n_bytes:
            job.arena.view[after : after + 1] = b"!"

    patch(jobs.StoredRead, _landed=sloppy)


@bug
def counts_what_it_did_not_move() -> None:
    rewrite_answers(lambda answers: [done._replace(moved_bytes=done.moved_bytes + 200_000) for done in answers])


@bug
def stops_at_frames_that_do_not_exist() -> None:
    def transfer(driver: NvmeDriver, effect: Transfer) -> TransferDone | None:
        if max(memoryview(effect.pairs).cast("i")) >= 32:
            sys.exit(1)
        return TRANSFER(driver, effect)

    patch(NvmeDriver, transfer=transfer)


@bug
def does_not_answer_a_malformed_transfer() -> None:
    answers = serve_module.answers

    def silent(message: list[Any], backend: Any) -> Sequence[list[Any]]:
        return [answer for answer in answers(message, backend) if answer[:1] != ["moved"] or answer[1] < 1_000_000]

    patch(serve_module, answers=silent)


@bug
def stays_when_the_channel_closes() -> None:
    serve = serve_module.serve_deep

    def stay(channel: Any, backend: Any) -> None:
        serve(channel, backend)
        while True:
            signal.pause()

    patch(serve_module, serve_deep=stay)


@bug
def computes() -> None:
    probe = NvmeDriver.probe
    patch(NvmeDriver, probe=lambda driver: probe(driver)._replace(capabilities=("read", "write", "drop", "exec")))


if __name__ == "__main__":
    BUGS[sys.argv[1]]()
    run_driver("wrong tier", make_backend, sys.argv[2:])
