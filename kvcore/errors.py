"""Everything the cache core raises on purpose.

CacheError
├── OutOfBlocks      the pool cannot cover the request now; nothing was changed
├── InvalidRequest   an argument is wrong: the caller's mistake, never a matter of load
├── StaleLease       the lease was already released
└── WireError        bytes that are no valid message, or of a version this code does not know
"""


class CacheError(Exception):
    """Base of every error raised by `kvcore`."""


class OutOfBlocks(CacheError):
    """The pool has too few free or evictable blocks. The cache is exactly as it was before the call.

    `needed` and `available` count blocks.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} free or evictable")
        self.needed = needed
        self.available = available


class InvalidRequest(CacheError):
    """An argument is out of range, of the wrong type, or contradicts another one."""


class StaleLease(CacheError):
    """A lease was used after its release."""


class WireError(CacheError):
    """Bytes from another process could not be understood."""
