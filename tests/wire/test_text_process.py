"""The text process: what it does, and what is left when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from attnix.kernel.calls import Message
from attnix.kernel.errors import E
from attnix.syscalls import textservice
from attnix.syscalls.ports import Failure
from attnix.syscalls.records import pack_ids, unpack_ids
from attnix.syscalls.text import LONG_CHARS
from attnix.syscalls.textservice import TextService, TextUnavailable
from attnix.syscalls.textservice import _Worker as Worker

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a byte-level tokenizer: token id = place in GPT-2's byte alphabet, then SPECIAL."""
    directory = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def run(model: Path, use: Any, **hooks: Any) -> TextService:
    """Run `use(service)` in a loop of its own, and close the service."""
    service = TextService(str(model), **hooks)

    async def main() -> None:
        await service.start()
        try:
            await asyncio.wait_for(use(service), 60)
        finally:
            await service.close()

    asyncio.run(main())
    return service


def job(submit: Any, *args: Any) -> asyncio.Future[Any]:
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    submit(*args, done.set_result)
    return done


def read(service: TextService, outcome: bytes) -> str:
    return service.table.text(unpack_ids(outcome))


def test_it_describes_and_encodes(model: Path) -> None:
    async def use(service: TextService) -> None:
        assert service.has_template and service.tokenizer_path.endswith("tokenizer.json")
        assert service.stop_ids == (256,)
        assert await job(service.encode, "", 0) == b""
        plain = await job(service.encode, "h\u00e9 <|end|>", 0)
        assert read(service, plain) == "h\u00e9 <|end|>", "markup in plain text is text"
        assert 256 not in unpack_ids(plain)
        chat = await job(service.encode_messages, (Message("user", "a<|end|>b"),), b"", 0)
        assert unpack_ids(chat).count(256) == 1 and unpack_ids(chat)[0] == 257 and unpack_ids(chat)[-1] == 258
        more = await job(service.encode_messages, (Message("user", "x"),), pack_ids([3]), 9)
        assert unpack_ids(more)[0] == 256, "the reply's turn is closed first"

    run(model, use)


def test_what_the_template_refuses_is_einval(model: Path) -> None:
    async def use(service: TextService) -> None:
        outcome = await job(service.encode_messages, (Message("bad", "x"),), b"", 0)
        assert isinstance(outcome, Failure) and outcome.code == E.EINVAL and "no such role" in str(outcome.detail)

    run(model, use)


def test_jobs_survive_their_worker(model: Path) -> None:
    """Killed with 200 jobs queued: another worker does them, in order, each once."""
    said: list[tuple[str, str]] = []

    async def use(service: TextService) -> None:
        first = service.worker_pid
        os.kill(first, signal.SIGSTOP)  # or it may be through with all of them
        jobs = [job(service.encode, f"job {n} " * 200, 0) for n in range(200)]
        os.kill(first, signal.SIGKILL)
        done = [read(service, outcome) for outcome in await asyncio.gather(*jobs)]
        assert done == [f"job {n} " * 200 for n in range(200)]
        assert service.worker_pid != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)

    run(model, use, log=lambda level, text: said.append((level, text)))
    assert [level for level, _ in said] == ["warning"]


def test_a_job_that_kills_its_worker_fails_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textservice, "BACKOFF_SECONDS", (0.0,) * 5)

    spawn = Worker._spawn

    async def use(service: TextService) -> None:
        os.kill(service.worker_pid, signal.SIGSTOP)  # it does none of them meanwhile
        poison, good = job(service.encode, "poison", 0), job(service.encode, "good", 0)

        def killed(worker: Worker) -> None:
            spawn(worker)
            if not poison.done():
                os.kill(worker.pid, signal.SIGKILL)

        monkeypatch.setattr(Worker, "_spawn", killed)
        os.kill(service.worker_pid, signal.SIGKILL)
        assert (await poison).code == E.EIO
        assert read(service, await good) == "good"

    run(model, use)


@pytest.mark.parametrize("verb", ["text", "messages"])
def test_nobody_waits_for_somebodys_book(model: Path, verb: str) -> None:
    """Long texts have a process of their own, which ends when there are none."""

    async def use(service: TextService) -> None:
        book = "book " * (LONG_CHARS // 5 + 1)
        long = (
            job(service.encode, book, 0)
            if verb == "text"
            else job(service.encode_messages, (Message("user", "short"), Message("user", book)), b"", 0)
        )
        while not service.long_pid:
            await asyncio.sleep(0)
        pid = service.long_pid
        os.kill(pid, signal.SIGSTOP)  # it takes as long as it likes
        more = job(service.encode, book, 0)
        for n in range(20):
            assert read(service, await job(service.encode, f"sentence {n}", 0)) == f"sentence {n}"
        assert not long.done() and not more.done() and service.long_pid == pid
        os.kill(pid, signal.SIGCONT)
        assert book in read(service, await long) and read(service, await more) == book
        assert not service.long_pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert read(service, await job(service.encode, book, 0)) == book, "and another when there is another"

    run(model, use)


def test_leaving_while_a_long_text_is_begun(model: Path) -> None:
    async def use(service: TextService) -> None:
        job(service.encode, "book " * (LONG_CHARS // 5 + 1), 0)

    service = run(model, use)
    assert not service.long_pid


def test_a_job_that_takes_too_long_is_given_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual_s, spawn = textservice.JOB_SECONDS, Worker._spawn
    monkeypatch.setattr(textservice, "JOB_SECONDS", 0.2)

    def patient(worker: Worker) -> None:
        monkeypatch.setattr(textservice, "JOB_SECONDS", usual_s)  # on a busy machine the next one may be as slow
        spawn(worker)

    async def use(service: TextService) -> None:
        monkeypatch.setattr(Worker, "_spawn", patient)
        stopped = service.worker_pid
        os.kill(stopped, signal.SIGSTOP)  # hung
        slow = job(service.encode, "slow", 0)
        assert read(service, await slow) == "slow"
        assert service.worker_pid != stopped

    run(model, use)


def test_a_worker_that_cannot_be_started_again_leaves_nobody_waiting(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptors are left, then there are some again."""
    monkeypatch.setattr(textservice, "BACKOFF_SECONDS", (0.0,) * 5)
    spawn = Worker._spawn

    def fails(worker: Worker) -> None:
        raise OSError(24, "Too many open files")

    async def use(service: TextService) -> None:
        monkeypatch.setattr(Worker, "_spawn", fails)
        os.kill(service.worker_pid, signal.SIGKILL)
        outcome = await job(service.encode, "waits", 0)
        assert isinstance(outcome, Failure) and outcome.code == E.EIO
        monkeypatch.setattr(Worker, "_spawn", spawn)
        while isinstance(outcome, Failure):
            outcome = await job(service.encode, "again", 0)
        assert read(service, outcome) == "again"

    run(model, use)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TextUnavailable, match=r"tokenizer\.json"):
        TextService(str(tmp_path))
    with pytest.raises(TextUnavailable, match="no model"):
        TextService(str(tmp_path / "nothing"))


def test_close_leaves_no_process(model: Path) -> None:
    async def use(service: TextService) -> None:
        job(service.encode, "never answered", 0)

    service = run(model, use)
    with pytest.raises(ProcessLookupError):
        os.kill(service.worker_pid, 0)
