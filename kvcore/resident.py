"""The published blocks: finding the longest prefix of a prompt among them, adding to them, removing.

They form one tree per namespace and are prefix-closed: a block is published only below published blocks, and
removed only after its children. So the longest match is a binary search over prefix hashes. Hashes only
propose: tokens and parents of every matched block are compared, so a collision can cost a hit and never
hands out another prompt's KV.
"""

import numpy as np
import numpy.typing as npt

from kvcore.blocks import CACHED, BlockIds, BlockPool
from kvcore.children import ChildIndex
from kvcore.events import Snapshot
from kvcore.index import HashIndex
from kvcore.spaces import Spaces

_NOTHING = np.empty(0, dtype=np.intp)


class ResidentBlocks:
    """The prefix trees over one pool. Parents are block ids, or `-1 - space` for the root of a namespace."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.spaces = Spaces()
        self.index = HashIndex(pool.hashes)
        self.children = ChildIndex(pool.tokens)

    def match(
        self, tokens: npt.NDArray[np.int32], hashes: npt.NDArray[np.uint64], space: int
    ) -> BlockIds:
        """The longest published prefix, as block ids intp[d].

        `hashes` uint64[m] are the prefix hashes of the first m full blocks of `tokens`; d <= m.
        """
        depth = self._deepest(hashes)
        if depth == 0:
            return _NOTHING
        ids = self.index.find(hashes[:depth])
        return ids[: self.verified(ids, tokens, -1 - space)]

    def partial(self, parent: int, wanted: npt.NDArray[np.int32]) -> tuple[int, int]:
        """Where a hit can go on inside a block: the best child of `parent` and how many tokens it shares."""
        return self.children.best(parent, wanted)

    def verified(self, ids: BlockIds, tokens: npt.NDArray[np.int32], parent: int) -> int:
        """How many leading blocks of intp[m] really are the chain below `parent` that holds `tokens`.

        `ids` may contain -1 (absent). `tokens` has at least m blocks.
        """
        pool = self.pool
        good = ids >= 0
        parents = pool.parents.take(ids)
        good[1:] &= parents[1:] == ids[:-1]
        good[:1] &= parents[:1] == parent
        wanted = tokens[: len(ids) * pool.block_size].reshape(len(ids), pool.block_size)
        same = pool.tokens.take(ids, axis=0) == wanted
        if good.all() and same.all():
            return len(ids)
        good &= same.all(axis=1)
        return len(ids) if good.all() else int(good.argmin())

    def twins(
        self, hashes: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32], parent: int
    ) -> tuple[BlockIds, int]:
        """What is there already of a chain below `parent` that is about to be published.

        Returns the published blocks with the same content, intp[k], and how many blocks after those can be
        published: all, unless another prefix has taken a hash, and nothing can be published below that one.
        """
        found = self.index.find(hashes)
        same = self.verified(found, tokens, parent) if found[0] >= 0 else 0
        taken = found[same:] >= 0
        fresh = int(taken.argmax()) if taken.any() else len(taken)
        return found[:same], _until_repeated(hashes[same : same + fresh])

    def publish(
        self,
        ids: BlockIds,
        hashes: npt.NDArray[np.uint64],
        tokens: npt.NDArray[np.int32],
        parent: int,
        space: int,
    ) -> None:
        """Publish a chain of new blocks intp[m] below `parent`.

        `hashes` uint64[m], `tokens` int32[m * block_size]. `twins` has said that no hash is in use.
        """
        pool = self.pool
        pool.tokens[ids] = tokens.reshape(len(ids), pool.block_size)
        pool.hashes[ids] = hashes
        pool.parents[ids[0]] = parent
        pool.parents[ids[1:]] = ids[:-1]
        pool.spaces[ids] = space
        pool.state[ids] = CACHED
        self.index.insert(ids)
        self.children.link_chain(parent, ids)
        self.spaces.add(space, len(ids))

    def unpublish(self, ids: BlockIds) -> None:
        """Remove blocks intp[m] with all their descendants in `ids`. Their state is the caller's to set."""
        self.index.remove(ids)
        self.children.unlink(ids, self.pool.parents[ids])
        self.spaces.leave_each(self.pool.spaces[ids])

    def snapshot(self, epoch: int, seq: int) -> Snapshot:
        """All published blocks, as of sequence number `seq`."""
        pool = self.pool
        ids = np.flatnonzero(pool.state == CACHED)
        place = np.full(pool.num_blocks + 1, -1, dtype=np.int32)  # the last one serves every root
        place[ids] = np.arange(len(ids), dtype=np.int32)
        spaces, owners = np.unique(pool.spaces[ids], return_inverse=True)
        return Snapshot(
            epoch=epoch,
            seq=seq,
            hashes=pool.hashes[ids],
            parents=place[np.maximum(pool.parents[ids], -1)],
            owners=owners.astype(np.int32),
            namespaces=tuple(self.spaces.digest(space) for space in spaces.tolist()),
        )

    def _deepest(self, hashes: npt.NDArray[np.uint64]) -> int:
        """A depth whose hash is present and the next one's is not; never less than the true match."""
        low, high = 0, len(hashes)
        if high and self.index.find_one(int(hashes[-1])) >= 0:
            return high
        high = max(high - 1, 0)
        # A follow-up shares nearly all, a stranger nothing: both ends are the likeliest, so 0 is tried early.
        if high and self.index.find_one(int(hashes[0])) < 0:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if self.index.find_one(int(hashes[middle - 1])) >= 0:
                low = middle
            else:
                high = middle - 1
        return low


def _until_repeated(hashes: npt.NDArray[np.uint64]) -> int:
    """How many leading hashes there are before one that repeats an earlier one."""
    if len(hashes) < 2:
        return len(hashes)
    ordered = np.sort(hashes)
    if not np.any(ordered[1:] == ordered[:-1]):
        return len(hashes)
    repeated = np.ones(len(hashes), dtype=np.bool_)
    repeated[np.unique(hashes, return_index=True)[1]] = False
    return int(repeated.argmax())
