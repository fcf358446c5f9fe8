"""llama.cpp through its C API as llama-cpp-python binds it: `llama_decode` over batches, argmax between them.

KV is float16 as by default (as wide as bfloat16), each sequence has a stream of its own (`kv_unified` off: its
authors' advice where sequences share nothing), flash attention is as llama.cpp chooses.
"""

from __future__ import annotations

import ctypes
import os
import time
from importlib import import_module
from typing import Any

BATCH_TOKENS = 2048  # llama.cpp's own default of n_batch; it cuts that into ubatches of 512


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._np: Any = import_module("numpy")
        c: Any = import_module("llama_cpp")
        self._c = c
        self._threads = int(settings["threads"])
        c.llama_backend_init()
        self._quiet = c.llama_log_callback(lambda level, text, data: None)
        c.llama_log_set(self._quiet, None)
        self._model = c.llama_model_load_from_file(settings["gguf"].encode(), c.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings['gguf']}")
        self._vocab_tokens = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._shape = (0, 0)
        self._batch = c.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.version = f"llama-cpp-python {c.__version__}, {c.llama_print_system_info().decode().strip()}"

    def prefill(self, prompts: list[list[int]]) -> tuple[float, list[int]]:
        self._open(len(prompts), len(prompts[0]) + 256)
        self._firsts = [0] * len(prompts)
        self._prompt = prompts[0]
        self._length = len(prompts[0])
        began = time.perf_counter()
        rows: list[tuple[int, int, int, bool]] = []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                rows.append((token, position, sequence, position + 1 == len(prompt)))
                if len(rows) == BATCH_TOKENS:
                    self._decode(rows, self._firsts)
                    rows = []
        if rows:
            self._decode(rows, self._firsts)
        return time.perf_counter() - began, self._firsts

    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        memory = self._c.llama_get_memory(self._context)
        for sequence in range(len(self._firsts)):  # back to the end of the prompt
            self._c.llama_memory_seq_rm(memory, sequence, self._length, -1)
        now = list(self._firsts)
        tokens: list[list[int]] = [[] for _ in now]
        began = time.perf_counter()
        for step in range(steps):
            self._decode([(token, self._length + step, s, True) for s, token in enumerate(now)], now)
            for made, token in zip(tokens, now, strict=True):
                made.append(token)
        return time.perf_counter() - began, tokens

    def save(self, path: str) -> float:
        """Write the state of the first prompt's sequence to a file, as the server's slot save does; seconds."""
        tokens = (self._c.llama_token * self._length)(*self._prompt)
        began = time.perf_counter()
        written = self._c.llama_state_seq_save_file(self._context, path.encode(), 0, tokens, self._length)
        seconds = time.perf_counter() - began
        if not written:
            raise RuntimeError(f"llama.cpp could not save to {path}")
        return seconds

    def resume(self, path: str, cold: bool) -> tuple[float, int]:
        """Read such a file into an empty context, evaluate the last token again as the server does: (seconds, next token).

        cold: its pages are dropped from the page cache first, as far as the system does that when asked.
        """
        memory = self._c.llama_get_memory(self._context)
        self._c.llama_memory_clear(memory, True)
        if cold:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        tokens, count = (self._c.llama_token * self._length)(), ctypes.c_size_t(0)
        drawn = [0]
        began = time.perf_counter()
        read = self._c.llama_state_seq_load_file(
            self._context, path.encode(), 0, tokens, self._length, ctypes.byref(count)
        )
        if not read or count.value != self._length:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self._c.llama_memory_seq_rm(memory, 0, self._length - 1, -1)
        self._decode([(tokens[self._length - 1], self._length - 1, 0, True)], drawn)
        return time.perf_counter() - began, drawn[0]

    def close(self) -> None:
        if self._context:
            self._c.llama_free(self._context)
        self._context, self._shape = None, (0, 0)

    def _open(self, sequences: int, tokens: int) -> None:
        """A context of this shape, empty."""
        c = self._c
        if self._shape == (sequences, tokens):
            c.llama_memory_clear(c.llama_get_memory(self._context), False)
            return
        self.close()
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = sequences * tokens, sequences, BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        self._context = c.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context for {sequences} sequences of {tokens} tokens")
        self._shape = (sequences, tokens)

    def _decode(self, rows: list[tuple[int, int, int, bool]], drawn: list[int]) -> None:
        """One llama_decode; the next token of each row that asks for it goes to its sequence's place in `drawn`."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        status = self._c.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")
        for i, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = self._c.llama_get_logits_ith(self._context, i)
                drawn[sequence] = int(self._np.ctypeslib.as_array(logits, (self._vocab_tokens,)).argmax())
