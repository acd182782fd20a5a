"""What one sequence holds of the cache, from claim to release."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.blocks import BlockIds
from kvcore.hashing import PrefixChain


@dataclass(frozen=True)
class BlockCopy:
    """A hit that ends inside a block: copy the KV of the first `num_tokens` slots of block `src` to `dst`."""

    src: int
    dst: int
    num_tokens: int


class Lease:
    """A sequence's tokens and block table. Made by `PrefixCache.claim`, changed only through the cache.

    `cached_tokens` is the hit at the claim, `computed` how many leading tokens have their KV in place. `copy`
    is set from a claim with a partial hit until the first commit or the release; the engine does that copy,
    in all layers, before it computes. After the release the arrays can still be read, and mean nothing.
    """

    __slots__ = (
        "_block_ids",
        "_block_size",
        "_chain",
        "_hash_buffer",
        "_hashed",
        "_make_chain",
        "_num_blocks",
        "_num_tokens",
        "_token_buffer",
        "cached_tokens",
        "computed",
        "copy",
        "published",
        "publishing",
        "released",
        "space",
    )

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        blocks: BlockIds,
        hashes: npt.NDArray[np.uint64],
        chain: PrefixChain | None,
        make_chain: Callable[[], PrefixChain],
        block_size: int,
        space: int,
    ) -> None:
        """Own a copy of `tokens` int32[n]; `blocks` intp[ceil(n / block_size)]; `hashes` of leading blocks.

        `chain` is the hash chain at the end of `hashes`; without one, `make_chain` starts it when needed.
        """
        self._token_buffer = tokens.copy()
        self._num_tokens = len(tokens)
        self._block_ids = blocks.astype(np.int32)
        self._num_blocks = len(blocks)
        self._hash_buffer = hashes
        self._hashed = len(hashes)
        self._chain = chain
        self._make_chain = make_chain
        self._block_size = block_size
        self.space = space
        self.cached_tokens = 0
        self.computed = 0
        self.copy: BlockCopy | None = None
        self.published = 0  # leading blocks of the table that are published ones
        self.publishing = True  # False: nothing more of this sequence becomes visible
        self.released = False

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32[n]: the recorded tokens, a view."""
        return self._token_buffer[: self._num_tokens]

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """int32[ceil(n / block_size)]: the block table, a view. A commit may replace entries."""
        return self._block_ids[: self._num_blocks]

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """uint64[n // block_size]: prefix hashes of the recorded full blocks, a view."""
        return self.hashes_to(self._num_tokens // self._block_size)

    def hashes_to(self, count: int) -> npt.NDArray[np.uint64]:
        """uint64[count]: prefix hashes of the first `count` full blocks; computes those not known yet."""
        if count > self._hashed:
            size = self._block_size
            if self._chain is None:
                # The caller brought hashes without their running sum: go over the prompt once.
                self._chain, self._hashed = self._make_chain(), 0
            new = self._chain.extend(self._token_buffer[self._hashed * size : count * size])
            self._hash_buffer = _with_room(self._hash_buffer, self._hashed, count)
            self._hash_buffer[self._hashed : count] = new
            self._hashed = count
        return self._hash_buffer[:count]

    def record(self, tokens: npt.NDArray[np.int32], blocks: BlockIds) -> None:
        """Append tokens and the blocks they need beyond those of the table."""
        end = self._num_tokens + len(tokens)
        self._token_buffer = _with_room(self._token_buffer, self._num_tokens, end)
        self._token_buffer[self._num_tokens : end] = tokens
        self._num_tokens = end
        if len(blocks):
            end = self._num_blocks + len(blocks)
            self._block_ids = _with_room(self._block_ids, self._num_blocks, end)
            self._block_ids[self._num_blocks : end] = blocks
            self._num_blocks = end


def _with_room(buffer: npt.NDArray, used: int, needed: int) -> npt.NDArray:
    """The buffer, or a larger copy of its used part: growth by a half keeps appending cheap."""
    if needed <= len(buffer):
        return buffer
    larger = np.empty(max(needed, len(buffer) + len(buffer) // 2 + 8), dtype=buffer.dtype)
    larger[:used] = buffer[:used]
    return larger
