"""Decode steps recorded once and replayed: a launch a step instead of hundreds.

A CUDA graph repeats what it was recorded with: kernels, shapes, addresses. So a recording of each of a ladder
of batch sizes reads tensors that stay where they are; a step's input is copied there, and rows that are left
over write to the spare block and attend to nothing. The output projection is not recorded: logits of every
size would take memory of their own.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.ops import PagedSeqs
from replica.batch import ForwardBatch
from replica.pass_inputs import Pass, PassInputs, resolved, wide

logger = logging.getLogger(__name__)

_SMALL, _STEP = (1, 2, 4), 8


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, then every eighth, and `most` itself."""
    return (*(size for size in _SMALL if size < most), *range(_STEP, most, _STEP), most)


class Recorder(Protocol):
    """Makes a run repeatable."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats `run`, on the same tensors with whatever they hold then."""


class PlainRecorder:
    """Repeats a run by running it again: for devices without graphs."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """The run itself."""
        return run


class CudaRecorder:
    """Records CUDA graphs, whose memory they share: never replay two at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One of our own: torch's is shared by the process, on the device that happened to record first.
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """A graph's replay, on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Compiles kernels, and lets libraries allocate what they keep for each stream: a recording may
            # not do the one, and would do the other in memory of its own.
            run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Another thread's use of the GPU, such as a second engine's, must not spoil the recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


def recorder_of(device: torch.device) -> Recorder:
    """The recorder for a kind of device."""
    return CudaRecorder(device) if device.type == "cuda" else PlainRecorder()


@dataclass(frozen=True)
class Static:
    """Tensors that recordings read and write, for `most` rows.

    Attributes:
        ints: int64[3, most], token ids, positions, slots.
        tables: int32[most, blocks of the longest context].
        starts: int32[most + 1], 0, 1, 2, ...
        contexts: int32[most], 0 for a row that is left over.
        hidden: [most, hidden_size], the result.
    """

    ints: Tensor
    tables: Tensor
    starts: Tensor
    contexts: Tensor
    hidden: Tensor


class DecodeGraphs:
    """Recordings of a model's decode step.

    Args:
        hidden: computes a pass, [rows, hidden_size].
        inputs: makes attention plans, and brings input to the device.
        out: an empty tensor like the result of `hidden`, [most, hidden_size].
        longest: context in tokens that any sequence may reach.
        spare_slot: where left over rows may write their keys and values.
    """

    def __init__(
        self,
        hidden: Callable[[Pass], Tensor],
        inputs: PassInputs,
        out: Tensor,
        longest: int,
        spare_slot: int,
        recorder: Recorder,
    ) -> None:
        self.sizes = ladder(len(out))
        self._hidden = hidden
        self._inputs = inputs
        self._longest = longest
        self._spare = spare_slot
        self._static = _static(out, -(-longest // inputs.block_size), spare_slot)
        started = time.perf_counter()
        # The largest first: the others find room in its memory.
        self._replays = {size: recorder.record(self._run_of(size)) for size in reversed(self.sizes)}
        logger.info(
            "%d decode graphs, up to %d sequences, recorded in %.1f s",
            len(self.sizes),
            self.sizes[-1],
            time.perf_counter() - started,
        )

    def run(self, batch: ForwardBatch, drawn: Tensor | None) -> Tensor | None:
        """[S, hidden_size] of a batch that a recording fits, to be read before the next run; else None.

        It fits decodes alone, all of which want logits, in order. `drawn` as in `Model.forward`.
        """
        rows = batch.num_seqs
        decodes = rows == batch.num_tokens == len(batch.logit_rows) and rows <= self.sizes[-1]
        if not decodes or int(batch.context_lens.max()) > self._longest:
            return None
        size = self.sizes[bisect.bisect_left(self.sizes, rows)]
        self._fill(batch, size, drawn)
        self._replays[size]()
        return self._static.hidden[:rows]

    def _fill(self, batch: ForwardBatch, size: int, drawn: Tensor | None) -> None:
        rows, static = batch.num_seqs, self._static
        ints = np.zeros((3, size), dtype=np.int64)
        ints[2] = self._spare
        ints[:, :rows] = wide(batch.token_ids), wide(batch.positions), wide(batch.slots)
        contexts = np.zeros(size, dtype=np.int32)
        contexts[:rows] = batch.context_lens
        tables = np.ascontiguousarray(batch.block_tables[:, : static.tables.shape[1]], dtype=np.int32)
        sent_ints, sent_contexts, sent_tables = self._inputs.staging.put([ints, contexts, tables])
        ids = sent_ints[0, :rows]
        known = resolved(ids, batch, drawn)
        if known is not ids:
            ids.copy_(known)
        static.ints[:, :size].copy_(sent_ints)
        static.contexts[:size].copy_(sent_contexts)
        static.tables[:rows, : tables.shape[1]].copy_(sent_tables)

    def _run_of(self, size: int) -> Callable[[], None]:
        static = self._static
        # Of the host's figures only the longest context counts: the launch must do for all.
        no_tables = torch.empty((size, 0), dtype=torch.int64)
        seqs = PagedSeqs((1,) * size, (self._longest,) * size, no_tables, self._inputs.block_size)
        arrays = (static.tables[:size], static.starts[: size + 1], static.contexts[:size])
        ids, positions, slots = static.ints[:, :size]
        step = Pass(ids, positions, slots, None, size, self._inputs.plans(seqs, arrays), {})
        out = static.hidden[:size]

        def run() -> None:
            out.copy_(self._hidden(step))

        return run


def _static(out: Tensor, blocks: int, spare_slot: int) -> Static:
    """Static tensors in which every row is left over."""
    most, device = len(out), out.device
    ints = torch.zeros((3, most), dtype=torch.int64, device=device)
    ints[2] = spare_slot
    return Static(
        ints=ints,
        tables=torch.zeros((most, blocks), dtype=torch.int32, device=device),
        starts=torch.arange(most + 1, dtype=torch.int32, device=device),
        contexts=torch.zeros(most, dtype=torch.int32, device=device),
        hidden=out,
    )
