"""The hit rate of one cache that never forgets: what no router over separate caches can exceed.

A request's ideal hit is the longest common prefix of its prompt with any earlier prompt, token by token,
and at most its length less one (the last token is computed again to have logits to sample from).
Prompts are kept in a path-compressed trie whose edges are views of the prompts, so a prompt of n tokens
costs one vectorised comparison of its n tokens, and at most two new nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from router.lab.blocks import TokenIds
from router.lab.record import Request


@dataclass(slots=True)
class _Node:
    """A trie node; `edge` holds the tokens between its parent and it (never empty but at the root)."""

    edge: TokenIds
    children: dict[int, _Node] = field(default_factory=dict)


class InfiniteCache:
    """Every prompt ever added, at token granularity.

    Keeps views of the arrays it is given: the caller must not write to them afterwards.
    """

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32))

    def add(self, tokens: TokenIds) -> int:
        """Remember `tokens`, int32[n]; return how many of the first were known already, at most n - 1."""
        node, depth = self._root, 0
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                node.children[int(tokens[depth])] = _Node(tokens[depth:])
                break
            common = common_prefix(child.edge, tokens[depth:])
            depth += common
            if common < len(child.edge):
                if depth < len(tokens):
                    _split(child, common).children[int(tokens[depth])] = _Node(tokens[depth:])
                break
            node = child
        return max(0, min(depth, len(tokens) - 1))

    def find(self, tokens: TokenIds) -> int:
        """How many of the first tokens are known, perhaps all; nothing is remembered."""
        node, depth = self._root, 0
        while depth < len(tokens) and (child := node.children.get(int(tokens[depth]))) is not None:
            common = common_prefix(child.edge, tokens[depth:])
            depth += common
            if common < len(child.edge):
                break
            node = child
        return depth


def _split(node: _Node, at: int) -> _Node:
    """Cut `node`'s edge after `at` tokens: the node ends there and a new child takes over the rest."""
    rest = _Node(node.edge[at:], node.children)
    node.edge, node.children = node.edge[:at], {int(rest.edge[0]): rest}
    return node


def common_prefix(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> int:
    """Length of the longest common prefix of two arrays of one dimension."""
    n = min(len(left), len(right))
    differs = left[:n] != right[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def ideal_hits(prompts: Iterable[TokenIds]) -> list[int]:
    """The ideal hit, in tokens, of each prompt in the order of their sending."""
    cache = InfiniteCache()
    return [cache.add(prompt) for prompt in prompts]


def resident_hits(requests: Iterable[Request], block_size: int) -> list[int]:
    """The hit, in tokens, of each prompt in one prefix cache with blocks of `block_size` that never forgets.

    Only full blocks are kept, but a hit may end within one, and be a whole prompt, as in `pooled`. Prompts of
    hash ids are compared by their ids, so that their tokens need no memory.
    """
    cache, seen, hits = InfiniteCache(), set[int](), []
    for request in requests:
        blocks = request.blocks
        if blocks is None:
            tokens = request.tokens()
            hits.append(cache.find(tokens))
            cache.add(tokens[: len(tokens) // block_size * block_size])
            continue
        keys = blocks.keys().tolist()
        known = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        hits.append(min(known * blocks.size, blocks.num_tokens))
        full = blocks.num_tokens // block_size * block_size
        seen.update(keys[: -(-full // blocks.size)])
    return hits
