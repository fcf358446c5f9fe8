from typing import Any

class _Lib:
    AX_CRC_TABLE: int
    AX_CRC_INSTRUCTION: int
    AX_CRC_FOLDING: int
    def ax_crc_best(self) -> int: ...
    def ax_crc32c(self, crc: int, data: Any, n: int) -> int: ...
    def ax_crc32c_with(self, way: int, crc: int, data: Any, n: int) -> int: ...
    def ax_copy_crc32c(self, crc: int, to: Any, source: Any, n: int) -> int: ...
    def ax_copy_crc32c_with(self, way: int, crc: int, to: Any, source: Any, n: int) -> int: ...
    def ax_header_encode(self, s: Any, header: Any, tag: Any, checksums: Any, generation: int) -> None: ...
    def ax_header_stamp(self, header: Any, generation: int) -> None: ...
    def ax_header_check(self, s: Any, header: Any, tag: Any) -> int: ...
    def ax_seal(
        self,
        s: Any,
        bare: Any,
        bare_bytes: int,
        stored: Any,
        stored_bytes: int,
        pairs: Any,
        n: int,
        tags: Any,
        codes: Any,
    ) -> int: ...
    def ax_unseal(
        self,
        s: Any,
        bare: Any,
        bare_bytes: int,
        stored: Any,
        stored_bytes: int,
        pairs: Any,
        n: int,
        tags: Any,
        codes: Any,
    ) -> int: ...
    def ax_unseal_gated(
        self,
        s: Any,
        bare: Any,
        bare_bytes: int,
        stored: Any,
        stored_bytes: int,
        pairs: Any,
        n: int,
        tags: Any,
        codes: Any,
        gate: Any,
        ticket: int,
        group: int,
    ) -> int: ...
    def ax_verify(self, s: Any, stored: Any, stored_bytes: int, indices: Any, n: int, tags: Any, codes: Any) -> int: ...
    def ax_verify_layers(
        self,
        s: Any,
        stored: Any,
        stored_bytes: int,
        indices: Any,
        n: int,
        tags: Any,
        codes: Any,
        first: int,
        count: int,
    ) -> int: ...
    def ax_void(self, s: Any, stored: Any, stored_bytes: int, indices: Any, n: int, codes: Any) -> int: ...
    def ax_seal_placed(self, s: Any, stored: Any, indices: Any, n: int, tags: Any, codes: Any) -> None: ...
    def ax_verify_one(self, s: Any, header: Any, payload: Any, tag: Any) -> int: ...
    def ax_copy_layers(self, s: Any, to: Any, source: Any, count: int, checksums: Any) -> None: ...
    def ax_compare_layers(self, header: Any, checksums: Any, first: int, count: int) -> int: ...
    def ax_gate_store(self, gate: Any, value: int) -> None: ...
    def ax_gate_load(self, gate: Any) -> int: ...

class _Ffi:
    NULL: Any
    def new(self, ctype: str, init: Any = ...) -> Any: ...
    def cast(self, ctype: str, value: Any) -> Any: ...
    def from_buffer(self, ctype: str, buffer: Any, require_writable: bool = ...) -> Any: ...
    def memmove(self, to: Any, source: Any, n: int) -> None: ...
    def buffer(self, cdata: Any, size: int = ...) -> Any: ...

lib: _Lib
ffi: _Ffi
