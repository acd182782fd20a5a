"""What one sequence holds of the cache, from claim to release."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.arrays import BlockIds, Hashes, Tokens
from kvcore.hashing import PrefixChain, PrefixHasher
from kvcore.namespace import Namespace
from kvcore.retention import Retention


class Prompt(NamedTuple):
    """What a claim asks for.

    `tokens` is int32[n]. `hashes` are the prefix hashes of the full blocks, if the caller has them (uint64,
    at least n // block_size, from the cache's secret). `read=False` uses no cached block (for prompt
    log-probabilities); `publish=False` never makes this sequence's blocks visible. `retention` says how long
    to keep which tokens.
    """

    tokens: Tokens
    namespace: Namespace
    hashes: Hashes | None = None
    read: bool = True
    publish: bool = True
    retention: tuple[Retention, ...] = ()


@dataclass(frozen=True)
class BlockCopy:
    """Copy the KV of the first `num_tokens` slots of block `src` to `dst`, where the sequence goes on.

    A hit that ends inside a block, or the first write of a forked sequence into a block that it shares.
    """

    src: int
    dst: int
    num_tokens: int


class Lease:
    """A sequence's tokens and block table. Made by `PrefixCache.claim` and `fork`, changed only by the cache.

    `cached_tokens` is the hit at the claim, `computed` how many leading tokens have their KV in place. `copy`
    is set from a claim with a partial hit, or an append to a shared block, until the next commit, truncate or
    release; the engine does that copy, in all layers, before it computes. After the release the arrays can
    still be read, and mean nothing.
    """

    def __init__(self, prompt: Prompt, hasher: PrefixHasher, block_size: int) -> None:
        """Own a copy of the prompt's tokens, hash its full blocks unless it brings hashes or needs none."""
        self._token_buffer = prompt.tokens.copy()
        self._num_tokens = len(prompt.tokens)
        self._num_blocks = -(-self._num_tokens // block_size)
        self._block_ids: BlockIds = np.empty(self._num_blocks, dtype=np.int32)
        self._hasher = hasher
        self._chain: PrefixChain | None = None
        full = self._num_tokens // block_size
        self._hash_buffer = np.empty(0, np.uint64) if prompt.hashes is None else prompt.hashes[:full].copy()
        self._hashed = len(self._hash_buffer)
        self.block_size = block_size
        self.namespace = prompt.namespace
        self.space = -1  # the number of its namespace in the cache
        self.cached_tokens = 0
        self.computed = 0
        self.copy: BlockCopy | None = None
        self.published = 0  # leading blocks of the table that are published ones
        self.reading = prompt.read
        self.publishing = prompt.publish  # False: nothing more of this sequence becomes visible
        self.retention = prompt.retention

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def tokens(self) -> Tokens:
        """int32[n]: the recorded tokens, a view."""
        return self._token_buffer[: self._num_tokens]

    @property
    def blocks(self) -> BlockIds:
        """int32[ceil(n / block_size)]: the block table, a view. A commit or an append may replace entries."""
        return self._block_ids[: self._num_blocks]

    @property
    def hashes(self) -> Hashes:
        """uint64[n // block_size]: prefix hashes of the recorded full blocks, a view."""
        return self.hashes_to(self._num_tokens // self.block_size)

    def hashes_to(self, count: int) -> Hashes:
        """uint64[count]: prefix hashes of the first `count` full blocks; computes those not known yet."""
        if count > self._hashed:
            size = self.block_size
            if self._chain is None:
                # The caller brought hashes without their running sum: go over the prompt once.
                self._chain = self._hasher.chain(size, self._hasher.root(self.namespace))
                self._hashed = 0
            new = self._chain.extend(self._token_buffer[self._hashed * size : count * size])
            self._hash_buffer = _with_room(self._hash_buffer, self._hashed, count)
            self._hash_buffer[self._hashed : count] = new
            self._hashed = count
        return self._hash_buffer[:count]

    def record(self, tokens: Tokens, blocks: BlockIds) -> None:
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

    def settle(self, start: int, tokens: Tokens) -> None:
        """Replace recorded tokens, from place `start` on; none of them is computed."""
        self._token_buffer[start : start + len(tokens)] = tokens
        if self._hashed > start // self.block_size:
            self._hashed, self._chain = start // self.block_size, None

    def cut(self, length: int) -> BlockIds:
        """Forget the tokens after the first `length`; returns the blocks that are no longer needed."""
        size, keep = self.block_size, -(-length // self.block_size)
        gone = self._block_ids[keep : self._num_blocks]
        self._num_tokens, self._num_blocks = length, keep
        self.computed = min(self.computed, length)
        self.published = min(self.published, length // size)
        if self._hashed > length // size:
            self._hashed, self._chain = length // size, None
        return gone

    def twin(self) -> "Lease":
        """A lease on the computed tokens and their blocks, with nothing of it shared but the blocks."""
        twin = Lease(
            Prompt(self._token_buffer[: self.computed], self.namespace), self._hasher, self.block_size
        )
        twin._block_ids[:] = self._block_ids[: twin._num_blocks]
        if self._hashed <= self.computed // self.block_size:
            twin._hash_buffer, twin._hashed = self._hash_buffer[: self._hashed].copy(), self._hashed
            twin._chain = self._chain and self._chain.copy()
        for name in ("space", "reading", "cached_tokens", "computed", "published", "publishing", "retention"):
            setattr(twin, name, getattr(self, name))
        return twin


def _with_room(buffer: npt.NDArray, used: int, needed: int) -> npt.NDArray:
    """The buffer, or a larger copy of its used part: growth by a half keeps appending cheap."""
    if needed <= len(buffer):
        return buffer
    larger = np.empty(max(needed, len(buffer) + len(buffer) // 2 + 8), dtype=buffer.dtype)
    larger[:used] = buffer[:used]
    return larger
