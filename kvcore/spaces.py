"""Small numbers for the namespaces that are in use.

Blocks name their namespace by an int32. A namespace is forgotten with its last user (a lease or a published
block), so a stream of one-off salts does not grow anything.
"""

import numpy as np
import numpy.typing as npt


class Spaces:
    """Numbers 0, 1, ... for namespace digests, reused after their last user has gone."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = []
        self._users: list[int] = []
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, digest: bytes) -> int:
        """The number of a namespace, or -1 when nobody uses it."""
        return self._numbers.get(digest, -1)

    def digest(self, space: int) -> bytes:
        """The digest of a number in use."""
        return self._digests[space]

    def users(self, space: int) -> int:
        """How many users a number has."""
        return self._users[space]

    def enter(self, digest: bytes) -> int:
        """The number of a namespace, with one user more."""
        space = self._numbers.get(digest, -1)
        if space < 0:
            space = self._unused.pop() if self._unused else len(self._digests)
            if space == len(self._digests):
                self._digests.append(b"")
                self._users.append(0)
            self._digests[space] = digest
            self._numbers[digest] = space
        self._users[space] += 1
        return space

    def add(self, space: int, count: int) -> None:
        """`count` users more of a number in use."""
        self._users[space] += count

    def leave(self, space: int, count: int = 1) -> None:
        """`count` users less; the number is free again after the last one."""
        self._users[space] -= count
        if self._users[space] == 0:
            del self._numbers[self._digests[space]]
            self._unused.append(space)

    def leave_each(self, spaces: npt.NDArray[np.int32]) -> None:
        """One user less for each entry of int32[m]."""
        counts = np.bincount(spaces)
        for space in np.flatnonzero(counts).tolist():
            self.leave(space, int(counts[space]))
