"""Figures of a cache: what its blocks are doing now, and counters since it was made."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts since the cache was made; tokens are those of claims that succeeded."""

    claims: int = 0
    forks: int = 0
    hit_tokens: int = 0  # found at the claim, partial hits included
    partial_hit_tokens: int = 0  # of those, copied from inside a block
    missed_tokens: int = 0
    stored: int = 0  # blocks published
    cleared: int = 0  # blocks removed by clear
    deduplicated: int = 0  # blocks given back because an identical one was published first
    collisions: int = 0  # sequences that stopped publishing because another prefix has their hash


@dataclass
class Room:
    """How full a cache is: the part of `CacheStats` that is asked for all the time."""

    free: int
    cached: int
    held: int
    eviction_age_s: float | None


@dataclass
class CacheStats(Counters, Room):
    """One consistent reading. `free + cached + held == num_blocks`, always.

    `free` blocks hold nothing, `cached` ones are published and idle (can be evicted), `held` ones belong to
    leases; `published` counts all visible blocks, idle or held. `eviction_age_s` is how long the next victim
    has been idle, in seconds; None when nothing can be evicted.

    `evictions` counts blocks evicted to make room, `idle_s` the time from their last use to that, summed over
    them. `regrets` of them were asked for again (as far as ghosts remember), `regret_s` after their eviction,
    summed. `block_seconds` is the time that blocks have been published, summed: divided by the number of
    blocks that went, their mean lifetime.
    """

    num_blocks: int = 0
    published: int = 0
    leases: int = 0
    evictions: int = 0
    idle_s: float = 0.0
    regrets: int = 0
    regret_s: float = 0.0
    block_seconds: float = 0.0
