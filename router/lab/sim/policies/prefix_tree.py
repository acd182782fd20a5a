"""A radix tree of prompts and who got them: how routers without cache events guess what is cached where.

A prompt becomes a string of two characters for every 16 tokens, a hash of them: a tree of tokens would keep
megabytes of text to no use, as no cache shares less than a block. What is left of a prompt counts as 16
tokens that match only themselves.
"""

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

CHUNK = 16
"""Tokens that two characters stand for."""
TOKENS_PER_CHARACTER = CHUNK // 2
_MULTIPLIERS = np.random.default_rng(0).integers(1 << 63, size=CHUNK, dtype=np.uint64) * 2 + 1


def as_text(tokens: npt.NDArray[np.int32]) -> str:
    """Tokens int32[n] as a string of 2 * ceil(n / 16) characters; equal prefixes have equal strings."""
    padded = np.full(-(-len(tokens) // CHUNK) * CHUNK, -1, np.int64)
    padded[: len(tokens)] = tokens
    mixed = (padded.view(np.uint64).reshape(-1, CHUNK) + np.uint64(2)) * _MULTIPLIERS
    sums = mixed.sum(axis=1, dtype=np.uint64)
    halves = np.stack((sums >> np.uint64(44), (sums >> np.uint64(24)) & np.uint64(0xFFFFF)), axis=1)
    return halves.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def shared(one: str, other: str) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is a hundred times faster."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Node:
    """A piece of text below `parent`, and its holders with the time of their last use (0: only passed)."""

    def __init__(self, text: str, parent: "Node | None") -> None:
        self.text = text
        self.parent = parent
        self.children: dict[str, Node] = {}
        self.holders: dict[int, int] = {}

    def split_off(self, upper: "Node") -> None:
        """`upper` has been put above this node, with the first part of its text."""
        upper.holders = dict(self.holders)

    def path(self) -> "Iterator[Node]":
        """This node and those above it, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class PrefixTree:
    """One tree for all holders, as SGLang's and Ray's are; `sizes` is the characters of each holder."""

    node_type = Node

    def __init__(self) -> None:
        self.root = self.node_type("", None)
        self.sizes: dict[int, int] = {}
        self._ticks = 0

    def add(self, holder: int) -> None:
        """Somebody who may get prompts."""
        self.sizes.setdefault(holder, 0)

    def remove(self, holder: int) -> None:
        """Forget a holder and everything of it."""
        for node in reversed(list(self.nodes())):
            if holder in node.holders:
                self._drop(node, holder)
        self.sizes.pop(holder, None)

    def extend(self, text: str) -> Node:
        """The node that ends where `text` does; made, with its text's nodes, if there is none."""
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = self.node_type(text[at:], node)
            elif not text.startswith(child.text, at):
                child = self._split(child, shared(child.text, text[at : at + len(child.text)]))
            node, at = child, at + len(child.text)
        return node

    def insert(self, text: str, holder: int) -> None:
        """A holder got a prompt."""
        leaf = self.extend(text)
        for node in leaf.path():
            if holder not in node.holders:
                node.holders[holder] = 0
                self.sizes[holder] += len(node.text)
        self._ticks += 1
        leaf.holders[holder] = self._ticks

    def match(self, text: str) -> tuple[int, list[int]]:
        """Characters of `text` that somebody got, and who got the last piece of them, first ones first."""
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                break
            whole = text.startswith(child.text, at)
            at += len(child.text) if whole else shared(child.text, text[at : at + len(child.text)])
            node = child
            if not whole:
                break
        return at, list(self.sizes if node is self.root else node.holders)

    def evict(self, limit: int) -> None:
        """Holders of more than `limit` characters lose leaves, least recently used first."""
        for holder, size in self.sizes.items():
            if size > limit:
                self._evict(holder, limit)

    def _evict(self, holder: int, limit: int) -> None:
        nodes = [node for node in self.nodes() if _is_leaf(node, holder)]
        heap = [(node.holders[holder], order, node) for order, node in enumerate(nodes)]
        heapq.heapify(heap)
        order = len(heap)
        while heap and self.sizes[holder] > limit:
            _, _, node = heapq.heappop(heap)
            self._drop(node, holder)
            above = node.parent
            if above is not None and _is_leaf(above, holder):
                heapq.heappush(heap, (above.holders[holder], order, above))
                order += 1

    def _drop(self, node: Node, holder: int) -> None:
        del node.holders[holder]
        self.sizes[holder] -= len(node.text)
        if not node.holders and not node.children and node.parent is not None:
            del node.parent.children[node.text[0]]

    def _split(self, lower: Node, length: int) -> Node:
        above = lower.parent
        assert above is not None
        upper = self.node_type(lower.text[:length], above)
        above.children[upper.text[0]] = upper
        lower.text, lower.parent = lower.text[length:], upper
        upper.children[lower.text[0]] = lower
        lower.split_off(upper)
        return upper

    def nodes(self, below: Node | None = None) -> Iterator[Node]:
        """All nodes, or all below one, each before those below it."""
        stack = list((below or self.root).children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _is_leaf(node: Node, holder: int) -> bool:
    return holder in node.holders and not any(holder in child.holders for child in node.children.values())
