"""Guesses at what comes next, for speculative decoding: what followed the same words before.

Prompt lookup (Saxena, github.com/apoorvumang/prompt-lookup-decoding): answers that quote, edit or summarise
their prompt repeat its n-grams. A guess costs no model; the step that checks it computes all its tokens at
once (speculative decoding, arXiv:2211.17192). A token is drawn exactly as without guesses, and a guess counts
while it equals the draw, so answers do not change.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np
import numpy.typing as npt

from replica.sequence import Sequence

LONGEST_MATCH = 3


class Drafter:
    """At most `most` guesses for a decode; never beyond `context_length` or the end of the answer."""

    def __init__(self, most: int, context_length: int) -> None:
        self.most = most
        self._context_length = context_length

    def guess(self, seq: Sequence, budget: int) -> npt.NDArray[np.int32]:
        """int32[k], `budget` at most; empty for a beam, and for a sequence that has not begun its answer."""
        if seq.lease is None or not seq.outputs or seq.sampling.use_beam_search:
            return look_up(np.empty(0, dtype=np.int32), 0)
        longest = min(seq.num_prompt + seq.sampling.max_tokens, self._context_length)
        # The step draws one token beyond the last guess, which must still fit.
        return look_up(seq.lease.tokens, min(self.most, budget, longest - seq.num_tokens - 1))


def look_up(tokens: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
    """int32[count] that followed the latest earlier occurrence of the last 3, else 2, else 1 of int32[n].

    Empty when the last token is new. Where less than `count` followed, the repetition goes on with itself.
    """
    last = len(tokens) - 1
    if count <= 0 or last < 1:
        return np.empty(0, dtype=np.int32)
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    for back in range(1, min(LONGEST_MATCH, last)):
        longer = ends[ends >= back]
        longer = longer[tokens[longer - back] == tokens[last - back]]
        if not len(longer):
            break
        ends = longer
    if not len(ends):
        return np.empty(0, dtype=np.int32)
    return np.resize(tokens[ends[-1] + 1 :], count)


def came_true(drafts: Tokens[int], drawn: Tokens[int]) -> int:
    """How many leading drafts equal the tokens drawn in their places."""
    count = 0
    while count < len(drafts) and drafts[count] == drawn[count]:
        count += 1
    return count
