"""Small numbers for the namespaces that are in use.

Blocks name their namespace by an int32. A namespace is forgotten with its last user (a lease or a published
block), so a stream of one-off salts does not grow anything. Users are counted in the pool's `spaces`, where
compiled loops publish and evict; those that have lost their last one wait in a list to be forgotten here.
"""

from collections.abc import Iterator

import numpy as np

from kvcore.blocks import Pool


class Spaces:
    """Numbers 0, 1, ... for namespace digests, reused after their last user has gone."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = []
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Digest and number of each namespace in use."""
        return iter(self._numbers.items())

    def find(self, digest: bytes) -> int:
        """The number of a namespace, or -1 when nobody uses it."""
        return self._numbers.get(digest, -1)

    def digest(self, space: int) -> bytes:
        """The digest of a number in use."""
        return self._digests[space]

    def enter(self, pool: Pool, digest: bytes) -> tuple[int, Pool]:
        """The number of a namespace; a new one has no user yet. The pool may come back with more room."""
        space = self._numbers.get(digest, -1)
        if space < 0:
            if self._unused:
                space = self._unused.pop()
            else:
                space = len(self._digests)
                self._digests.append(b"")
                if space == len(pool.spaces):
                    larger = np.concatenate((pool.spaces, np.zeros_like(pool.spaces)))
                    pool.spaces["child"] = -1  # a probe that still reads the old array finds no stale tree
                    pool = pool._replace(spaces=larger)
            self._digests[space] = digest
            self._numbers[digest] = space
            pool.spaces[space] = (0, -1, -1)
        return space, pool

    def forget_unused(self, pool: Pool) -> None:
        """Forget the namespaces that have lost their last user."""
        while (space := int(pool.state["unused_space"][0])) >= 0:
            pool.state["unused_space"] = pool.spaces["next_unused"][space]
            del self._numbers[self._digests[space]]
            self._unused.append(space)
