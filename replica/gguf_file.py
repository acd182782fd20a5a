"""A GGUF file, memory-mapped: metadata as Python values, tensors as float32 arrays on demand.

The format is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian. Quantized tensors are expanded
by the `gguf` package, or kept as they are (`gguf_groups`). The package's `GGUFReader` makes a numpy view of
each of a vocabulary's 100,000 strings and takes 2.5 s over a file of 100 MB; here the header is read in one
pass of `struct`, in 0.1 s.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kernels.grouped import GroupedWeight
from replica.errors import CorruptModel, ModelNotFound, UnsupportedModel
from replica.gguf_groups import grouped

SUPPORTED = frozenset(
    gguf.GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K")
)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `shape` is [out, in] (GGUF stores it reversed), `start` and `nbytes` in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    nbytes: int


class GgufFile:
    """An open file. Raises `CorruptModel` for one that is truncated or not GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelNotFound(f"no file {path}") from error
        except (OSError, ValueError) as error:
            raise CorruptModel(f"{path} cannot be read: {error}") from error
        self._at = 0
        try:
            self.metadata, self.tensors = self._read()
        except (struct.error, UnicodeDecodeError) as error:
            raise CorruptModel(f"{path} ends inside its header or is damaged: {error}") from error

    def tensor(self, name: str) -> npt.NDArray[np.float32] | None:
        """The tensor expanded to float32, or None when the file has none of this name."""
        info = self.tensors.get(name)
        if info is None:
            return None
        raw = self._bytes(info)
        if info.kind == gguf.GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(info.shape)
        if info.kind == gguf.GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32).reshape(info.shape)
        rows = raw.reshape(*info.shape[:-1], -1)
        return gguf.quants.dequantize(rows, info.kind).astype(np.float32, copy=False).reshape(info.shape)

    def grouped(self, name: str) -> GroupedWeight | None:
        """The matrix as it is quantized, or None when there is none of this name in groups of 32."""
        info = self.tensors.get(name)
        return None if info is None else grouped(self._bytes(info), info.kind, info.shape)

    def _bytes(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        if info.kind not in SUPPORTED:
            raise UnsupportedModel(f"tensor {info.name!r} of {self.path} has type {info.kind.name}")
        return np.frombuffer(self._data, np.uint8, info.nbytes, info.start)

    def _read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        magic, version = self._unpack("4sI")
        if magic != b"GGUF":
            raise CorruptModel(f"{self.path} is not a GGUF file (it begins with {magic!r})")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path} is GGUF version {version}; 2 and 3 are supported")
        num_tensors, num_values = self._unpack("QQ")
        # An entry takes at least 12 bytes, so a larger count can only be damage.
        if 12 * (num_tensors + num_values) > len(self._data):
            raise CorruptModel(f"{self.path} claims {num_tensors} tensors and {num_values} values: damaged")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._unpack("I")[0])
        infos = [self._tensor_header() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment < 1:
            raise CorruptModel(f"{self.path} has alignment {alignment}")
        base = -(-self._at // alignment) * alignment
        return metadata, {name: self._place(name, shape, kind, base + at) for name, shape, kind, at in infos}

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("I")
        if num_dims > _MAX_DIMS:
            raise CorruptModel(f"{self.path}: tensor {name!r} claims {num_dims} dimensions")
        shape = self._unpack(f"{num_dims}Q")
        kind, offset = self._unpack("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _place(self, name: str, shape: tuple[int, ...], kind_id: int, start: int) -> TensorInfo:
        try:
            kind = gguf.GGMLQuantizationType(kind_id)
        except ValueError as error:
            raise UnsupportedModel(f"{self.path}: tensor {name!r} has unknown type {kind_id}") from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = 1
        for size in shape:
            count *= size
        if shape and shape[-1] % block:
            raise CorruptModel(f"{self.path}: rows of {name!r} are not whole {kind.name} blocks")
        nbytes = count // block * block_bytes
        if start + nbytes > len(self._data):
            raise CorruptModel(
                f"{self.path} is truncated: {name!r} ends at byte {start + nbytes:,}, "
                f"the file has {len(self._data):,}"
            )
        return TensorInfo(name, shape, kind, start, nbytes)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        end = self._at + length
        if end > len(self._data):
            raise CorruptModel(f"{self.path} ends inside its header or is damaged")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise CorruptModel(f"{self.path}: metadata of unknown type {kind}")
        item, count = self._unpack("IQ")
        if count > len(self._data):
            raise CorruptModel(f"{self.path}: an array claims {count} items")
        if item in _SCALARS:
            return list(self._unpack(f"{count}{_SCALARS[item]}"))
        return [self._value(item) for _ in range(count)]
