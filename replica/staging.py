"""Small host arrays on their way to the device: packed into one pinned buffer, sent by one copy.

A copy from pageable memory, or one copy an array, would each make the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.integer] | npt.NDArray[np.float32]

_ALIGN = 16  # bytes; Triton compiles another kernel for addresses that are less aligned
_TYPES: dict[Any, torch.dtype] = {
    np.dtype("int64"): torch.int64,
    np.dtype("int32"): torch.int32,
    np.dtype("float32"): torch.float32,
}
_AT_LEAST = 1 << 16


class Staging:
    """Two host buffers in turns: one may be filled while the copy from the other is still to come.

    On a CPU the buffers are plain memory and what `put` returns lies in them: it is valid until the next but
    one call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [_buffer(0, self._cuda), _buffer(0, self._cuda)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def put(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Arrays of int64, int32 or float32 as tensors of the device, in the order of the current stream."""
        places, end = [], 0
        for array in arrays:
            start = end // array.itemsize
            places.append(slice(start, start + array.size))
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        buffer = self._free_buffer(end)
        for array, place in zip(arrays, places, strict=True):
            buffer.arrays[array.dtype][place] = array.reshape(-1)
        sent = self._send(buffer.memory, end)
        typed = {dtype: sent.view(_TYPES[dtype]) for dtype in {array.dtype for array in arrays}}
        flat = [typed[array.dtype][place] for array, place in zip(arrays, places, strict=True)]
        return [
            part if array.ndim == 1 else part.view(array.shape)
            for part, array in zip(flat, arrays, strict=True)
        ]

    def _free_buffer(self, nbytes: int) -> _Buffer:
        """The buffer whose turn it is, once its last copy is done; a larger one if it has to be."""
        self._turn = 1 - self._turn
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        if nbytes > len(self._buffers[self._turn].memory):
            self._buffers[self._turn] = _buffer(nbytes, self._cuda)
        return self._buffers[self._turn]

    def _send(self, host: Tensor, nbytes: int) -> Tensor:
        if not self._cuda:
            return host
        sent = host[:nbytes].to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._sent[self._turn] = event
        return sent


@dataclass(frozen=True)
class _Buffer:
    """uint8 memory, and the same as arrays of each type."""

    memory: Tensor
    arrays: dict[Any, npt.NDArray[Any]]


def _buffer(nbytes: int, pinned: bool) -> _Buffer:
    room = max(_AT_LEAST, 1 << max(nbytes - 1, 0).bit_length())
    memory = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
    return _Buffer(memory, {dtype: memory.numpy().view(dtype) for dtype in _TYPES})


class Fetched:
    """A tensor on its way to the host, behind what its stream has to do."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The values, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
