"""Small host arrays on their way to the device: packed into one pinned buffer, sent by one copy.

A copy from pageable memory, or one copy an array, would each make the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.integer] | npt.NDArray[np.float32]

_ALIGN = 16  # bytes; Triton compiles another kernel for addresses that are less aligned
_TYPES = {np.dtype("int64"): torch.int64, np.dtype("int32"): torch.int32, np.dtype("float32"): torch.float32}
_AT_LEAST = 1 << 16


class Staging:
    """Two host buffers in turns: one may be filled while the copy from the other is still to come.

    On a CPU the buffers are plain memory and what `put` returns lies in them: it is valid until the next but
    one call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [self._buffer(0), self._buffer(0)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def put(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Arrays of int64, int32 or float32 as tensors of the device, in the order of the current stream."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        host = self._free_buffer(end)
        memory = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            memory[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        sent = self._send(host[:end])
        return [
            sent[start : start + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def _free_buffer(self, nbytes: int) -> Tensor:
        """The buffer whose turn it is, once its last copy is done; a larger one if it has to be."""
        self._turn = 1 - self._turn
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        if nbytes > len(self._buffers[self._turn]):
            self._buffers[self._turn] = self._buffer(nbytes)
        return self._buffers[self._turn]

    def _buffer(self, nbytes: int) -> Tensor:
        room = max(_AT_LEAST, 1 << max(nbytes - 1, 0).bit_length())
        return torch.empty(room, dtype=torch.uint8, pin_memory=self._cuda)

    def _send(self, host: Tensor) -> Tensor:
        if not self._cuda:
            return host
        sent = host.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._sent[self._turn] = event
        return sent


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
