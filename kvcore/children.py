"""The published children of each block, for hits that end inside a block.

Nearly every block of a prefix tree has at most one child, so that one is kept in an array. A block with more
children, and every namespace's root, keeps them sorted by their tokens: the child with the longest common
prefix is then a neighbour of the place where the wanted tokens would be inserted.
"""

from array import array
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from kvcore.blocks import BlockIds

_NONE, _MANY = -1, -2


class ChildIndex:
    """Children by parent; a parent is a block id, or `-1 - space` for the root of a namespace.

    `tokens` int32[N, block_size] is the pool's array; it must be filled before a block is linked and stay so
    until it is unlinked.
    """

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        self._tokens = tokens
        self._only = np.full(len(tokens), _NONE, dtype=np.int32)
        self._fans: dict[int, array[int]] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of the array and of the sorted lists' items."""
        return self._only.nbytes + sum(fan.itemsize * len(fan) for fan in self._fans.values())

    def children(self, parent: int) -> list[int]:
        """Block ids of the children, in the order of their tokens."""
        if parent >= 0 and self._only[parent] != _MANY:
            only = int(self._only[parent])
            return [] if only == _NONE else [only]
        return list(self._fans.get(parent, ()))

    def link_chain(self, parent: int, ids: BlockIds) -> None:
        """Link new blocks intp[m]: the first below `parent`, each other one below the one before it."""
        self._link(parent, int(ids[0]))
        self._only[ids[:-1]] = ids[1:]

    def unlink(self, ids: BlockIds, parents: npt.NDArray[np.int32]) -> None:
        """Unlink blocks from their parents; they have no children, or those are in `ids` too."""
        at = np.maximum(parents, 0)
        alone = (parents >= 0) & (self._only.take(at) == ids)
        self._only[parents[alone]] = _NONE
        for i in np.flatnonzero(~alone).tolist():
            self._unlink_one(int(ids[i]), int(parents[i]))

    def best(self, parent: int, wanted: npt.NDArray[np.int32]) -> tuple[int, int]:
        """The child that shares the longest prefix with `wanted` int32[m], and how many tokens.

        (-1, 0) if no child shares the first token. At most `len(wanted)` tokens are shared, at most a block.
        """
        if parent >= 0 and (only := int(self._only[parent])) != _MANY:
            candidates = [] if only == _NONE else [only]
        else:
            fan = self._fans.get(parent)
            at = bisect_left(fan, wanted.tolist(), key=self._key) if fan else 0
            candidates = list(fan[max(at - 1, 0) : at + 1]) if fan else []
        best, length = -1, 0
        for child in candidates:
            common = _common(self._tokens[child], wanted)
            if common > length:
                best, length = child, common
        return best, length

    def _link(self, parent: int, child: int) -> None:
        if parent >= 0:
            only = int(self._only[parent])
            if only == _NONE:
                self._only[parent] = child
                return
            if only != _MANY:
                self._fans[parent] = array("i", [only])
                self._only[parent] = _MANY
        insort(self._fans.setdefault(parent, array("i")), child, key=self._key)

    def _unlink_one(self, child: int, parent: int) -> None:
        if parent >= 0 and self._only[parent] == child:
            self._only[parent] = _NONE
            return
        fan = self._fans[parent]
        at = bisect_left(fan, self._key(child), key=self._key)
        assert fan[at] == child, f"block {child} is not among the children of {parent}"
        fan.pop(at)
        if parent >= 0 and len(fan) == 1:
            self._only[parent] = fan[0]
            del self._fans[parent]
        elif not fan:
            del self._fans[parent]

    def _key(self, block: int) -> list[int]:
        return self._tokens[block].tolist()


def _common(have: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    size = min(len(have), len(wanted))
    differ = have[:size] != wanted[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size
