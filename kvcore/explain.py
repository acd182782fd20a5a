"""Why a prompt hits as far as it does, and no further."""

from dataclasses import dataclass

import numpy as np

from kvcore import habits, index, match
from kvcore.arrays import Tokens
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from kvcore.occupancy import Occupancy


@dataclass(frozen=True)
class Explanation:
    """The hit that a claim of `num_tokens` tokens would have now, and what ends it.

    `reason` is one of
        complete    all is cached but the last token, which is always computed
        short       only a part of a block is left, and parts are not published
        uncommitted a sequence is computing the next block
        evicted     the next block was evicted, `evicted_s_ago` seconds ago
        namespace   another namespace holds the next block
        differs     the cached prompts go on with other tokens from token `hit_tokens`
        unseen      nothing is known of the next block
    """

    num_tokens: int
    hit_tokens: int
    reason: str
    evicted_s_ago: float | None = None


def explain(state: Occupancy, hasher: PrefixHasher, tokens: Tokens, namespace: Namespace) -> Explanation:
    """The explanation for int32[n]; changes nothing."""
    pool, size = state.pool, state.pool.tokens.shape[1]
    hashes = hasher.block_hashes(tokens, size, hasher.root(namespace))
    space = state.spaces.find(namespace.digest())
    table = np.empty(len(hashes), dtype=np.int32)
    depth, _, common = match.find(pool, tokens, hashes, space, table) if len(tokens) else (0, -1, 0)
    hit, end = depth * size + common, (depth + 1) * size

    def because(reason: str, ago: float | None = None) -> Explanation:
        return Explanation(len(tokens), hit, reason, ago)

    if hit >= len(tokens) - 1:
        return because("complete")
    if end > len(tokens):
        return because("differs" if common else "short")
    if any(
        lease.publishing and lease.space == space and lease.computed < end <= len(lease)
        and np.array_equal(lease.tokens[:end], tokens[:end])
        for lease in state.leases
    ):  # fmt: skip
        return because("uncommitted")
    evicted_at = habits.evicted_at(pool, hashes[depth])
    if evicted_at > 0:
        return because("evicted", max(round(state.tick() - evicted_at, 3), 0.0))
    chain = hasher.chain(size, 0)
    chain.extend(tokens[:end])
    roots = [hasher.root_of(digest) for digest, other in state.spaces if other != space]
    if any(index.find(pool, key) >= 0 for key in chain.last_below(np.array(roots, dtype=np.uint64))):
        return because("namespace")
    return because("differs" if common else "unseen")
