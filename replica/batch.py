"""One forward pass, described in plain numpy: which tokens, where their KV goes, which rows need logits.

A batch mixes prefill chunks and decodes. Rows of one sequence are adjacent and in order of position; the
sequences follow each other in the order of `query_lens`. Block `b` owns the slots `b * block_size ... (b +
1) * block_size - 1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True)
class ForwardBatch:
    """S sequences with T new tokens in all.

    Attributes:
        token_ids: int[T], the new tokens of all sequences, one after another; -1 - row stands for the token
            drawn in that row of the step before, which is on the device only.
        positions: int[T], absolute position of each new token in its sequence.
        slots: int[T], KV slot each token's key and value are written to.
        query_lens: int[S], new tokens of each sequence (>= 1, their sum is T).
        context_lens: int[S], cached prefix plus new tokens of each sequence.
        block_tables: int[S, max_blocks], blocks of each sequence in order; entries past its context are
            ignored.
        logit_rows: int[R], rows of `token_ids` whose logits are wanted (R may be 0).
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_lens: IntArray
    context_lens: IntArray
    block_tables: IntArray
    logit_rows: IntArray

    @property
    def num_tokens(self) -> int:
        """T: new tokens in the batch."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """S: sequences in the batch."""
        return len(self.query_lens)

    @classmethod
    def build(cls, sequences: Sequence[tuple[IntArray, int, IntArray, int]], block_size: int) -> ForwardBatch:
        """Lay out a batch from (new token ids, tokens cached, block table, logits wanted) per sequence.

        The logits asked for are those of so many of the sequence's last new tokens.
        """
        query_lens = np.array([len(ids) for ids, _, _, _ in sequences], dtype=np.int64)
        starts = np.array([start for _, start, _, _ in sequences], dtype=np.int64)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, query_lens, strict=True)])
        tables = np.zeros((len(sequences), max(len(blocks) for _, _, blocks, _ in sequences)), dtype=np.int64)
        for row, (_, _, blocks, _) in enumerate(sequences):
            tables[row, : len(blocks)] = blocks
        owner = np.repeat(np.arange(len(sequences)), query_lens)
        slots = tables[owner, positions // block_size] * block_size + positions % block_size
        wanted = np.array([count for _, _, _, count in sequences], dtype=np.int64)
        last_wanted = np.cumsum(wanted)
        # Row i of the logits is the (last_wanted - 1 - i)-th before the end of its sequence.
        back = np.repeat(last_wanted, wanted) - 1 - np.arange(wanted.sum())
        return cls(
            token_ids=np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _, _, _ in sequences]),
            positions=positions,
            slots=slots,
            query_lens=query_lens,
            context_lens=starts + query_lens,
            block_tables=tables,
            logit_rows=np.repeat(np.cumsum(query_lens) - 1, wanted) - back,
        )

    def decodes_first(self) -> ForwardBatch:
        """The same batch with the sequences of one new token in front; logits keep their order."""
        single = self.query_lens == 1
        order = np.argsort(~single, kind="stable")
        if np.array_equal(order, np.arange(self.num_seqs)):
            return self
        starts = np.cumsum(self.query_lens) - self.query_lens
        rows = np.concatenate([np.arange(starts[s], starts[s] + self.query_lens[s]) for s in order])
        new_row = np.empty(self.num_tokens, dtype=np.int64)
        new_row[rows] = np.arange(self.num_tokens)
        return ForwardBatch(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            query_lens=self.query_lens[order],
            context_lens=self.context_lens[order],
            block_tables=self.block_tables[order],
            logit_rows=new_row[self.logit_rows],
        )
