"""Figures of a cache: what its blocks are doing now, and counters since it was made."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts since the cache was made; tokens are those of claims that succeeded."""

    claims: int = 0
    hit_tokens: int = 0  # found at the claim, partial hits included
    partial_hit_tokens: int = 0  # of those, copied from inside a block
    missed_tokens: int = 0
    stored: int = 0  # blocks published
    evictions: int = 0  # blocks evicted to make room
    cleared: int = 0  # blocks removed by clear
    deduplicated: int = 0  # blocks given back because an identical one was published first
    collisions: int = 0  # sequences that stopped publishing because another prefix has their hash


@dataclass(frozen=True)
class CacheStats:
    """One consistent reading. `free + cached + held == num_blocks`, always.

    `free` blocks hold nothing, `cached` ones are published and idle (can be evicted), `held` ones belong to
    leases; `published` counts all visible blocks, idle or held. `eviction_age_s` is how long the next victim
    has been idle, in seconds; None when nothing can be evicted.
    """

    num_blocks: int
    free: int
    cached: int
    held: int
    published: int
    leases: int
    eviction_age_s: float | None
    claims: int
    hit_tokens: int
    partial_hit_tokens: int
    missed_tokens: int
    stored: int
    evictions: int
    cleared: int
    deduplicated: int
    collisions: int

    @property
    def free_share(self) -> float:
        """Share of blocks, 0..1, that can be taken without evicting anything."""
        return self.free / self.num_blocks
