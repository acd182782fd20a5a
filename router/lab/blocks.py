"""Prompts known by what they share: block ids in place of tokens, as most public traces record them.

An id stands for `size` tokens; prompts share exactly the blocks whose ids they share. Ids come in runs (7, 8,
9, ...), in every trace that was seen, so that is how they are kept: a prompt of 100,000 tokens takes some
hundred bytes. Token ids are synthesized when a live endpoint needs them, by a fixed function of seed, id and
position, so they are the same in every run and on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace

TokenIds = NDArray[np.int32]
VOCAB = (1000, 30_000)
"""Token ids that are ordinary text in common vocabularies."""

_OWN_BLOCKS = 1 << 24
_SPACE = Namespace("trace")
_HASHER = PrefixHasher(b"trace")


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A prompt of `num_tokens` tokens as runs [first id, count] of blocks of `size` tokens: int64[r, 2].

    The last block may be cut short by `num_tokens`. Negative ids are blocks that no other prompt has.
    Synthesized tokens are drawn from [`vocab`[0], `vocab`[1]) by `seed`.
    """

    runs: NDArray[np.int64]
    size: int
    num_tokens: int
    vocab: tuple[int, int] = VOCAB
    seed: int = 0

    @classmethod
    def of(
        cls,
        ids: "Sequence[int] | NDArray[np.int64]",
        size: int,
        num_tokens: int,
        own: int,
        vocab: tuple[int, int] = VOCAB,
        seed: int = 0,
    ) -> "Blocks":
        """From ids; tokens that they do not cover are the prompt's own. `own` > 0 differs between prompts."""
        array = np.asarray(ids, np.int64)
        starts = np.flatnonzero(np.diff(array, prepend=array[:1] - 2) != 1)
        runs = np.stack([array[starts], np.diff(starts, append=len(array))], axis=1)
        return cls.of_runs(runs, size, num_tokens, own, vocab, seed)

    @classmethod
    def of_runs(
        cls,
        runs: NDArray[np.int64],
        size: int,
        num_tokens: int,
        own: int,
        vocab: tuple[int, int] = VOCAB,
        seed: int = 0,
    ) -> "Blocks":
        """From runs int64[r, 2], else as `of`."""
        missing = -(-num_tokens // size) - int(runs[:, 1].sum())
        if missing > 0:
            runs = np.concatenate([runs, np.array([[-own * _OWN_BLOCKS, missing]], np.int64)])
        return cls(runs, size, num_tokens, vocab, seed)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The id of every block, the partial last one among them: int64[ceil(num_tokens / size)]."""
        counts = self.runs[:, 1]
        ends = counts.cumsum()
        ids = np.arange(counts.sum()) + (self.runs[:, 0] - ends + counts).repeat(counts)
        return ids[: -(-self.num_tokens // self.size)]

    def keys(self, ids: NDArray[np.int64] | None = None) -> NDArray[np.uint64]:
        """A name for every block with all before it, as prefix caches do: uint64[ceil(num_tokens / size)].

        Equal keys are equal prefixes, also where a trace's ids name contents wherever they stand. `ids` for
        who has them.
        """
        ids = self.ids if ids is None else ids
        halves = np.ascontiguousarray(ids, np.dtype("<i8")).view("<i4")
        return _HASHER.block_hashes(halves, 2, _HASHER.root(_SPACE))

    def token_ids(self) -> TokenIds:
        """The synthesized tokens: int32[num_tokens]."""
        return synthesize(self.ids, self.size, self.vocab, self.seed)[: self.num_tokens]

    def stand_ins(self, ids: NDArray[np.int64] | None = None) -> TokenIds:
        """One and the same token for all of a block: int32[num_tokens], for who only compares prompts.

        Made in a tenth of the time of `token_ids`; two ids have the same token once in 2^31 pairs. `ids` for
        who has them.
        """
        ids = self.ids if ids is None else ids
        names = (_mix(ids.astype(np.uint64)) >> np.uint64(33)).astype(np.int32)
        return names.repeat(self.size)[: self.num_tokens]

    def scaled(self, factor: float) -> "Blocks":
        """Blocks and prompt `factor` times as long, but of a token at least; what is shared stays shared."""
        size = max(1, round(self.size * factor))
        num_tokens = max(1, round(self.num_tokens * size / self.size))
        return replace(self, size=size, num_tokens=num_tokens)


def synthesize(
    ids: NDArray[np.int64], length: int, vocab: tuple[int, int] = VOCAB, seed: int = 0
) -> TokenIds:
    """`length` tokens for each id, one after the other: int32[len(ids) * length].

    splitmix64's finalizer (Steele et al., OOPSLA 2014) of seed, id and position; vectorised, and the same on
    every platform and version of numpy, which numpy's own generators do not promise.
    """
    low, high = vocab
    positions = np.arange(length, dtype=np.uint64)
    rooted = _mix(ids.astype(np.uint64) + _mix(np.array([seed], np.uint64)))
    mixed = _mix(rooted[:, None] + positions[None, :] * np.uint64(0x9E3779B97F4A7C15))
    return (low + (mixed % np.uint64(high - low)).astype(np.int32)).astype(np.int32).reshape(-1)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
