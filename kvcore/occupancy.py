"""Who occupies which blocks of the pool: what the steps of a lease's life do, without lock or ceremony.

The loops over blocks are in `kvcore.holding`; here is what surrounds them: namespaces, retention, events and
counters.
"""

from collections.abc import Callable

import numpy as np

from kvcore import eviction, holding
from kvcore.arrays import BlockIds, Tokens
from kvcore.blocks import CACHED, DEAD, check_sizes, make_pool
from kvcore.errors import InvalidRequest, OutOfBlocks
from kvcore.events import EventLog
from kvcore.index import make_slots
from kvcore.lease import BlockCopy, Lease
from kvcore.retention import Retentions
from kvcore.spaces import Spaces
from kvcore.stats import Counters

Hit = tuple[int, int, int]
NO_HIT = (0, -1, 0)

_NO_BLOCKS = np.empty(0, dtype=np.int32)


class Occupancy:
    """The pool with its namespaces and leases. Every method leaves everything consistent or raises first."""

    def __init__(
        self, num_blocks: int, block_size: int, policy: str, clock: Callable[[], float], events: EventLog
    ) -> None:
        if policy not in eviction.POLICIES:
            known = ", ".join(sorted(eviction.POLICIES))
            raise InvalidRequest(f"unknown eviction policy {policy!r}; known: {known}")
        self._clock = clock
        self._now = clock()
        check_sizes(num_blocks, block_size)
        slots = make_slots(num_blocks)
        self.pool = make_pool(num_blocks, block_size, slots, eviction.POLICIES[policy], self._now)
        # Views, because reading a field of a record takes ten times as long; this array is never replaced.
        self._free, self._idle = self.pool.state["free"], self.pool.state["idle"]
        self.spaces = Spaces()
        self.leases: set[Lease] = set()
        self.counters = Counters()
        self._block_size = block_size
        self._events = events
        self._retentions = Retentions()

    def tick(self) -> float:
        """The time in s, later than any before: what happens later ranks later, however coarse the clock."""
        self._now = max(self._clock(), self._now + 1e-9)
        return self._now

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return int(self._free[0])

    @property
    def available(self) -> int:
        """Blocks that are free or can be evicted."""
        return int(self._free[0]) + int(self._idle[0])

    @property
    def eviction_age_s(self) -> float | None:
        """How long the next victim has been idle, in seconds."""
        now = self._clock()
        self.pool = self._retentions.expire(self.pool, now)
        idle_s = eviction.idle_s(self.pool, now)
        return None if idle_s < 0 else round(idle_s, 6)

    def pin_hit(self, lease: Lease) -> Hit:
        """Hold the longest cached prefix: the number of its full blocks, a block to copy from or -1, and how
        many of its tokens."""
        space = self.spaces.find(lease.namespace.digest())
        hashes = lease.hashes_to(len(lease) // self._block_size)
        return holding.pin_hit(self.pool, lease.tokens, hashes, space, lease.blocks)

    def admit(self, lease: Lease, hit: Hit) -> None:
        """Take the blocks that a pinned hit lacks; or let go of the hit and raise `OutOfBlocks`."""
        depth, source, common = hit
        need = len(lease.blocks) - depth
        if source >= 0 and need > self.available:  # the partial end is not worth failing for
            self._unpin(np.array([source], dtype=np.int32))
            source, common = -1, 0
        if need > (available := self.available):
            self._unpin(lease.blocks[:depth])
            raise OutOfBlocks(need, available)
        lease.space, self.pool = self.spaces.enter(self.pool, lease.namespace.digest())
        self.pool.spaces["users"][lease.space] += 1
        self.leases.add(lease)
        if lease.reading:  # before this claim's own evictions
            hashes = lease.hashes_to(len(lease) // self._block_size)
            holding.use_hit(self.pool, lease.blocks[:depth], hashes[depth:], self.tick())
        self._take(lease.blocks[depth:])
        if source >= 0:
            lease.copy = BlockCopy(source, int(lease.blocks[depth]), common)
        lease.published = depth
        lease.cached_tokens = lease.computed = depth * self._block_size + common
        self._retain(lease, 0, depth)
        self._count(lease, common)

    def append(self, lease: Lease, tokens: Tokens) -> None:
        """Record tokens and take their blocks, one more if they begin in one that others hold or hit."""
        place, inside = divmod(lease.computed, self._block_size)
        shared = bool(inside and len(tokens)) and holding.is_shared(self.pool, int(lease.blocks[place]))
        need = -(-(len(lease) + len(tokens)) // self._block_size) - len(lease.blocks) + shared
        if need == 0:
            lease.record(tokens, _NO_BLOCKS)
            return
        if need > (available := self.available):
            raise OutOfBlocks(need, available)
        blocks: BlockIds = np.empty(need, dtype=np.int32)
        self._take(blocks)
        if shared:
            lease.copy = BlockCopy(int(lease.blocks[place]), int(blocks[0]), inside)
            lease.blocks[place] = blocks[0]
        lease.record(tokens, blocks[shared:])

    def publish(self, lease: Lease, full: int) -> None:
        """Make the first `full` blocks of a lease visible, those that are not, or replace them by twins."""
        hashes, start = lease.hashes_to(full), lease.published
        now = self.tick()
        lease.published, fresh = holding.publish(
            self.pool, lease.tokens, hashes, lease.blocks, start, lease.space, now
        )
        new = lease.published - fresh
        if new:
            above = int(self.pool.blocks["hash"][lease.blocks[fresh - 1]]) if fresh else None
            digest = self.spaces.digest(lease.space)
            self._events.stored(hashes[fresh : lease.published].copy(), above, digest)
        self._retain(lease, start, lease.published)
        self.counters.stored += new
        self.counters.deduplicated += fresh - start
        if lease.published < full:
            lease.publishing = False
            self.counters.collisions += 1

    def fork(self, lease: Lease) -> Lease:
        """Another lease on the same blocks."""
        twin = lease.twin()
        holding.pin_all(self.pool, twin.blocks)
        self.pool.spaces["users"][twin.space] += 1
        self.leases.add(twin)
        self.counters.forks += 1
        return twin

    def end_copy(self, lease: Lease) -> None:
        """Let go of the block that a lease had to copy from."""
        if lease.copy is not None:
            self.drop(np.array([lease.copy.src], dtype=np.int32))
            lease.copy = None

    def drop(self, table: BlockIds) -> None:
        """Let go of blocks, last one first."""
        if len(table):
            self.pool = eviction.roomy(self.pool, len(table))
            holding.release(self.pool, table, self.tick())

    def leave(self, lease: Lease) -> None:
        """Let go of a whole lease."""
        self.leases.discard(lease)
        self.end_copy(lease)
        self.drop(lease.blocks)
        eviction.leave_space(self.pool, lease.space)
        self.spaces.forget_unused(self.pool)

    def clear(self, digest: bytes | None) -> int:
        """Forget the blocks of one namespace, or of all; returns how many are still held."""
        space = -1 if digest is None else self.spaces.find(digest)
        if digest is not None and space < 0:
            return 0
        for lease in self.leases:
            lease.publishing &= digest is not None and lease.space != space
        blocks, owners = self.pool.blocks, self.owners()
        hashes = blocks["hash"][(blocks["state"] == CACHED) & ((space < 0) | (owners == space))]
        self.counters.cleared += holding.forget(self.pool, owners, space, self.tick())
        if digest is None:
            self._events.cleared()
        elif len(hashes):
            self._events.removed(hashes, "cleared")
        held = np.count_nonzero((blocks["state"] == DEAD) & ((space < 0) | (owners == space)))
        self.spaces.forget_unused(self.pool)
        return int(held)

    def _unpin(self, table: BlockIds) -> None:
        """Let go of a hit that was not used."""
        self.pool = eviction.roomy(self.pool, len(table))
        holding.unpin_hit(self.pool, table)

    def owners(self) -> BlockIds:
        """int32[N]: the number of the namespace of each CACHED or DEAD block, -1 for others."""
        owners: BlockIds = np.full(len(self.pool.blocks), -1, dtype=np.int32)
        holding.find_owners(self.pool, owners)
        return owners

    def _take(self, table: BlockIds) -> None:
        """Fill a part of a block table with blocks for its own use; there are enough."""
        now = self.tick()
        self.pool = self._retentions.expire(self.pool, now)
        short = max(len(table) - self.free, 0)
        evicted = np.empty(short, dtype=np.uint64)
        if short:  # each may make its parent a leaf, in another heap than its own
            self.pool = eviction.roomy(self.pool, short)
        holding.take(self.pool, table, now, evicted)
        table.sort()  # neighbours in the pool stay neighbours in the sequence: attention reads them faster
        if short:
            self._events.removed(evicted, "evicted")
            self.spaces.forget_unused(self.pool)

    def _retain(self, lease: Lease, start: int, end: int) -> None:
        if lease.retention and end > start:
            self._retentions.apply(self.pool, lease.blocks[start:end], start, lease.retention, self._now)

    def _count(self, lease: Lease, common: int) -> None:
        counters = self.counters
        counters.claims += 1
        counters.hit_tokens += lease.cached_tokens
        counters.partial_hit_tokens += common
        counters.missed_tokens += len(lease) - lease.cached_tokens
