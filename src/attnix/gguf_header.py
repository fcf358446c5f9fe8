"""The header of a GGUF file: its metadata and where its tensors lie.  A leaf that imports nothing of attnix.

The text side (tokenizer, chat template) and the accel driver (geometry, weights) both need it and may not import each
other.  The `gguf` package's reader builds several numpy objects per string: 2 s for a vocabulary of 49 thousand, and a
driver that was killed would pay that at every restart; this walk takes about 0.1 s.  Tensor data stay in the file.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32


class GgufError(ValueError):
    """The file is not a GGUF file that can be read; the message names the file and what is wrong with it."""


class TensorEntry(NamedTuple):
    """Where one tensor lies.

    shape   outermost dimension first (numpy's order; the file holds the reverse)
    kind    ggml type number, `gguf.GGMLQuantizationType`
    offset  bytes from the beginning of the file
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufHeader(NamedTuple):
    """fields: key -> int, float, bool, str, or a list of them."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, TensorEntry]
    file_bytes: int


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read metadata and tensor table.  Error: GgufError, OSError."""
    path = Path(path)
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < 24:
            raise GgufError(f"{path}: too short for a GGUF file ({os.fstat(file.fileno()).st_size} bytes)")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Walk(path, data).header()
            except (struct.error, IndexError, RecursionError) as error:
                raise GgufError(f"{path}: the file ends inside its header; download it again") from error
            except UnicodeDecodeError as error:
                raise GgufError(f"{path}: a key or string of the header is not UTF-8; download it again") from error


class _Walk:
    """One pass over the header; `at` is the next unread byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise GgufError(f"{self.path}: not a GGUF file (it begins with {self.data[:4]!r})")
        self.at = 4
        version = self.scalar(_U32)
        if version not in VERSIONS:
            raise GgufError(f"{self.path}: GGUF version {version} is not supported (only {VERSIONS}, little-endian)")
        n_tensors, n_fields = self.scalar(_U64), self.scalar(_U64)
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self.string()
            fields[key] = self.value(self.scalar(_U32))
        entries = [self.tensor() for _ in range(n_tensors)]
        alignment = int(fields.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment <= 0:
            raise GgufError(f"{self.path}: general.alignment is {alignment}")
        base = -(-self.at // alignment) * alignment
        tensors = {entry.name: entry._replace(offset=base + entry.offset) for entry in entries}
        return GgufHeader(self.path, fields, tensors, len(self.data))

    def scalar(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def string(self) -> str:
        n_bytes = self.scalar(_U64)
        end = self.at + n_bytes
        if end > len(self.data):
            raise IndexError
        text = self.data[self.at : end].decode()
        self.at = end
        return text

    def strings(self, count: int) -> list[str]:
        """Many of `string`: a vocabulary and its merges are nearly all of a header."""
        data, end, size, length = self.data, self.at, len(self.data), _U64.unpack_from
        texts = []
        for _ in range(count):
            begin = end + _U64.size
            end = begin + length(data, end)[0]
            if end > size:
                raise IndexError
            texts.append(data[begin:end].decode())
        self.at = end
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise GgufError(f"{self.path}: unknown value type {kind} in the header; the file is damaged or too new")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar(_U32), self.scalar(_U64)
        if count > len(self.data):  # every element takes a byte at least
            raise IndexError
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        letter, size = _SCALARS[kind].format[1:], _SCALARS[kind].size
        values = struct.unpack_from(f"<{count}{letter}", self.data, self.at)
        self.at += count * size
        return list(values)

    def tensor(self) -> TensorEntry:
        name = self.string()
        dimensions = self.scalar(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise GgufError(f"{self.path}: tensor {name!r} has {dimensions} dimensions; the file is damaged")
        shape = tuple(self.scalar(_U64) for _ in range(dimensions))[::-1]
        return TensorEntry(name, shape, self.scalar(_U32), self.scalar(_U64))
