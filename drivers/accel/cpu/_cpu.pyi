from typing import Any

class _Lib:
    def ax_best_isa(self) -> int: ...
    def ax_new(self, shape: Any, inv_freq: Any, threads: int, isa: int) -> Any: ...
    def ax_free(self, e: Any) -> None: ...
    def ax_load_matrix(self, e: Any, which: int, layer: int, source: Any, dtype: int, rows: int, first: int) -> int: ...
    def ax_load_vector(self, e: Any, which: int, layer: int, source: Any, n: int) -> int: ...
    def ax_attach(
        self,
        e: Any,
        arena: Any,
        capacity: int,
        block_tokens: int,
        frame: Any,
        shift: Any,
        count: Any,
        generation: Any,
        slots: int,
        row_entries: int,
    ) -> None: ...
    def ax_forward(
        self,
        e: Any,
        seqs: Any,
        nseqs: int,
        tokens: Any,
        ntokens: int,
        copies: Any,
        ncopies: int,
        want: Any,
        nwant: int,
        gates: Any,
        ngates: int,
        limit_ns: int,
        logits: Any,
    ) -> int: ...
    def ax_attach_gates(self, e: Any, gates: Any, ngates: int) -> None: ...
    def ax_waited_ns(self, e: Any) -> int: ...
    def ax_error_detail(self, e: Any) -> int: ...
    def ax_phase_ns(self, e: Any, ns: Any) -> None: ...
    def ax_op_linear(
        self, isa: int, mr: int, x: Any, m: int, k: int, weight: Any, dtype: int, n: int, y: Any
    ) -> int: ...
    def ax_op_rms_norm(self, isa: int, x: Any, weight: Any, eps: float, m: int, n: int, y: Any) -> int: ...
    def ax_op_silu_mul(self, isa: int, gate: Any, up: Any, n: int, y: Any) -> int: ...
    def ax_op_rope(self, isa: int, x: Any, cosine: Any, sine: Any, m: int, head_dim: int) -> int: ...

lib: _Lib
ffi: Any
