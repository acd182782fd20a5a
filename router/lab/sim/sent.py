"""Which prefixes were ever sent to which replicas, in memory that grows with prompts, not with their blocks.

A path-compressed trie over prefix hashes: an edge is a view of a prompt's hashes, and carries a bit mask of
the replicas to which a prompt with all of them went. Masks shrink from the root on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from router.lab.ideal import common_prefix

Hashes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Node:
    """`edge` holds the hashes between its parent and it (never empty but at the root)."""

    edge: Hashes
    replicas: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class SentPrefixes:
    """Keeps views of the arrays it is given: the caller must not write to them afterwards."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.uint64))

    def find(self, hashes: Hashes) -> list[tuple[int, int]]:
        """The known part of a prompt, uint64[n], longest first: (depth in blocks, replicas it was sent to).

        The first entry is all that is known; between two entries the mask is that of the longer one.
        """
        found: list[tuple[int, int]] = []
        node, depth = self._root, 0
        while depth < len(hashes):
            child = node.children.get(int(hashes[depth]))
            if child is None:
                break
            common = common_prefix(child.edge, hashes[depth:])
            depth += common
            found.append((depth, child.replicas))
            if common < len(child.edge):
                break
            node = child
        return found[::-1]

    def add(self, hashes: Hashes, replica: int) -> None:
        """A prompt, uint64[n], goes to a replica."""
        node, depth, bit = self._root, 0, 1 << replica
        while depth < len(hashes):
            child = node.children.get(int(hashes[depth]))
            if child is None:
                node.children[int(hashes[depth])] = _Node(hashes[depth:], bit)
                return
            common = common_prefix(child.edge, hashes[depth:])
            if common < len(child.edge):
                _split(child, common)
            child.replicas |= bit
            node, depth = child, depth + common


def _split(node: _Node, at: int) -> None:
    """Cut `node`'s edge after `at` hashes: the node ends there and a new child takes over the rest."""
    rest = _Node(node.edge[at:], node.replicas, node.children)
    node.edge, node.children = node.edge[:at], {int(rest.edge[0]): rest}
