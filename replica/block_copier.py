"""Copy-on-write beside the computing steps: block copies on a stream of their own, fenced.

A copy waits only for running passes that it is at odds with: those that read or write a block it overwrites,
or write a block it reads. The next pass waits for all copies. So a block's content is never read before the
copy that makes it is done, and no block changes under whoever still uses it, even if its owner let go of it
while a step was running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from replica.batch import ForwardBatch, IntArray

Copies = Sequence[tuple[int, int, int]]


class Streams(Protocol):
    """A stream that computes and one that copies."""

    def mark(self) -> Any:
        """A place behind all that the computing stream has been given."""

    def passed(self, mark: Any) -> bool:
        """Whether all before the mark is done."""

    def copying(self, after: Sequence[Any]) -> Any:
        """A context whose work goes to the copying stream, after these marks."""

    def join(self) -> None:
        """What the computing stream is given from now on comes after all copies."""


class HostStreams:
    """Of a CPU, where everything is done when its call returns."""

    def mark(self) -> None:
        """Nothing to mark."""

    def passed(self, mark: None) -> bool:
        """Always."""
        return True

    @contextmanager
    def copying(self, after: Sequence[None]) -> Iterator[None]:
        """Here and now."""
        yield

    def join(self) -> None:
        """There is nothing to wait for."""


class CudaStreams:
    """The device's current stream computes, another one copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._side.wait_stream(torch.cuda.current_stream(device))  # which has made the caches

    def mark(self) -> torch.cuda.Event:
        """An event of the computing stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Asks without waiting."""
        return mark.query()

    @contextmanager
    def copying(self, after: Sequence[torch.cuda.Event]) -> Iterator[None]:
        """The host waits for nothing."""
        for event in after:
            self._side.wait_event(event)
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """The host waits for nothing."""
        torch.cuda.current_stream(self._device).wait_stream(self._side)


def streams_of(device: torch.device) -> Streams:
    """Those a device has."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


@dataclass(frozen=True)
class _Running:
    """A pass that may not be done: blocks it uses (padding of its tables included), and those it writes."""

    mark: Any
    used: IntArray
    written: IntArray


class BlockCopier:
    """Puts copies and passes in order.

    Args:
        copy: copies the first n tokens of block src to block dst for each (src, dst, n), in turn.
        block_size: tokens a block holds.
    """

    def __init__(self, copy: Callable[[Copies], None], streams: Streams, block_size: int) -> None:
        self._copy = copy
        self._streams = streams
        self._block_size = block_size
        self._running: list[_Running] = []
        self._copied = False

    def copy(self, copies: Copies) -> None:
        """Copy as soon as no running pass minds."""
        if not copies:
            return
        sources, targets, _ = np.array(copies, dtype=np.int64).T
        self._running = [run for run in self._running if not self._streams.passed(run.mark)]
        after = [
            run.mark
            for run in self._running
            if np.isin(targets, run.used).any() or np.isin(sources, run.written).any()
        ]
        self._copied = True  # what was launched before an error runs as well
        with self._streams.copying(after):
            self._copy(copies)

    @contextmanager
    def computing(self, batch: ForwardBatch) -> Iterator[None]:
        """A context for the pass that computes a batch: after all copies so far."""
        if self._copied:
            self._streams.join()
            self._copied = False
        try:
            yield
        finally:  # what was launched before an error runs as well
            written = batch.slots // self._block_size
            self._running = [run for run in self._running if not self._streams.passed(run.mark)]
            self._running.append(_Running(self._streams.mark(), batch.block_tables, written))
