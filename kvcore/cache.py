"""The prefix cache of one engine: which KV blocks hold what, who uses them, and which go next.

A sequence's life is `claim` (pin the hit, take the blocks it needs, or change nothing), `append` and `commit`
in turns, `release`. Only `commit` makes blocks visible, after their KV was really written; only full blocks
become visible. The cache handles block ids and tokens, never KV itself.

Threads: one thread owns the leases (claim, append, commit, release, clear). `probe`, `stats`, `snapshot`,
`events_since`, `events` and a `FingerprintFeed` may be used from any other thread meanwhile: every public
method holds one lock, for microseconds in a sequence's life and some milliseconds in a snapshot or a clear.
"""

import secrets
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcore import audit
from kvcore.blocks import CACHED, DEAD, PRIVATE, BlockIds, BlockPool
from kvcore.errors import InvalidRequest, OutOfBlocks, StaleLease
from kvcore.events import EventBatch, EventLog, Snapshot
from kvcore.eviction import make_order
from kvcore.hashing import PrefixChain, PrefixHasher, as_tokens
from kvcore.lease import BlockCopy, Lease
from kvcore.namespace import Namespace
from kvcore.resident import ResidentBlocks
from kvcore.stats import CacheStats, Counters

Tokens = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]

_NO_HASHES = np.empty(0, dtype=np.uint64)
_NO_BLOCKS = np.empty(0, dtype=np.intp)


class PrefixCache:
    """A pool of `num_blocks` blocks of `block_size` tokens with a prefix tree over the published ones.

    `policy` names the eviction order ("lru"); `clock` returns seconds and is read at releases and in `stats`.
    `epoch` names this life of the cache in its events (default: random); `events` brings an own log instead,
    and with it its epoch.

    Raises `InvalidRequest` for sizes below 1, an unknown policy, or an epoch that contradicts the log's.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: PrefixHasher,
        *,
        policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        epoch: int | None = None,
        events: EventLog | None = None,
    ) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        if events is None:
            events = EventLog(secrets.randbits(62) + 1 if epoch is None else epoch)
        elif epoch not in (None, events.epoch):
            raise InvalidRequest(f"epoch {epoch} is not that of the event log, {events.epoch}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hasher = hasher
        self.events = events
        self._clock = clock
        self._resident = ResidentBlocks(self._pool)
        self._order = make_order(policy, num_blocks)
        self._leases: set[Lease] = set()
        self._counters = Counters()
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """The name of this life of the cache."""
        return self.events.epoch

    @property
    def seq(self) -> int:
        """Number of the latest event, 0 before the first."""
        return self.events.seq

    @property
    def nbytes(self) -> int:
        """Host memory of the cache's arrays; leases and events come on top."""
        resident = self._resident.index.nbytes + self._resident.children.nbytes
        return self._pool.nbytes + resident + self._order.nbytes

    def probe(self, tokens: Tokens, namespace: Namespace, hashes: Hashes | None = None) -> int:
        """How many leading tokens of int32[n] a claim would find now; at most n - 1. Changes nothing.

        `hashes` as in `claim`.
        """
        tokens = as_tokens(tokens)
        if len(tokens) == 0:
            return 0
        hashes, _ = self._hashes(tokens, namespace, hashes)
        with self._lock:
            hit, _, common = self._find(tokens, hashes, self._resident.spaces.find(namespace.digest()))
            return len(hit) * self.block_size + common

    def claim(
        self,
        tokens: Tokens,
        namespace: Namespace,
        *,
        hashes: Hashes | None = None,
        read: bool = True,
        publish: bool = True,
    ) -> Lease:
        """Pin the longest cached prefix of int32[n] and take blocks for all n tokens.

        At least the last token is left to compute. `hashes` are the prefix hashes of the full blocks, if the
        caller has them (uint64, at least n // block_size, from this secret). `read=False` uses no cached
        block (for prompt log-probabilities); `publish=False` never makes this sequence's blocks visible.

        Raises `OutOfBlocks` when the pool cannot hold the sequence now: nothing has changed then.
        Raises `InvalidRequest` for no tokens, or tokens or hashes of a wrong type or shape.
        """
        tokens = as_tokens(tokens)
        if len(tokens) == 0:
            raise InvalidRequest("a claim needs at least one token")
        known, chain = self._hashes(tokens, namespace, hashes) if read or publish else (_NO_HASHES, None)
        with self._lock:
            spaces, digest = self._resident.spaces, namespace.digest()
            found = self._find(tokens, known, spaces.find(digest)) if read else (_NO_BLOCKS, -1, 0)
            hit, source, common = self._affordable(len(tokens), *found)
            self._pin(hit)
            if source >= 0:
                self._pin(np.array([source]))
            own = self._take(-(-len(tokens) // self.block_size) - len(hit))
            blocks = np.concatenate((hit, own))
            space = spaces.enter(digest)
            lease = Lease(
                tokens, blocks, known, chain, lambda: self._chain(namespace), self.block_size, space
            )
            self._begin(lease, len(hit), source, common)
            lease.publishing = publish
            return lease

    def append(self, lease: Lease, tokens: Tokens) -> None:
        """Record more tokens int32[m] of a sequence and take the blocks they need.

        Raises `OutOfBlocks` when there are too few: nothing has changed then. Raises `StaleLease`,
        `InvalidRequest`.
        """
        tokens = as_tokens(tokens)
        with self._lock:
            self._check_live(lease)
            need = -(-(len(lease) + len(tokens)) // self.block_size) - len(lease.blocks)
            if need > 0 and need > (available := self._available()):
                raise OutOfBlocks(need, available)
            lease.record(tokens, self._take(need) if need > 0 else _NO_BLOCKS)

    def commit(self, lease: Lease, computed: int) -> None:
        """The KV of the first `computed` tokens is written, all of it: make the full blocks visible.

        Where an identical block is visible already, the block table gets that one instead of the own copy.
        The first commit also ends the pin on `lease.copy`'s source. Blocks claimed before a `clear` of their
        namespace stay invisible.

        Raises `StaleLease`; `InvalidRequest` when `computed` goes back or beyond the recorded tokens.
        """
        with self._lock:
            self._check_live(lease)
            if not lease.computed <= computed <= len(lease):
                raise InvalidRequest(f"computed {computed} is not in {lease.computed}..{len(lease)}")
            lease.computed = computed
            self._end_copy(lease)
            full = computed // self.block_size
            if full > lease.published and lease.publishing:
                self._publish(lease, full)

    def release(self, lease: Lease) -> None:
        """Let go of a sequence: its visible blocks can be evicted from now on, tails first. Idempotent."""
        with self._lock:
            if lease.released:
                return
            lease.released = True
            self._leases.discard(lease)
            self._end_copy(lease)
            self._unpin(lease.blocks[::-1].astype(np.intp))
            self._resident.spaces.leave(lease.space)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget all blocks, or those of one namespace; none can be hit any more.

        Returns how many of them are still held by sequences: those die with their last holder. Sequences
        claimed before the call publish nothing after it.
        """
        with self._lock:
            space = -1 if namespace is None else self._resident.spaces.find(namespace.digest())
            if namespace is not None and space < 0:
                return 0
            for lease in self._leases:
                lease.publishing &= namespace is not None and lease.space != space
            pool = self._pool
            ours = np.ones(self.num_blocks, bool) if namespace is None else pool.spaces == space
            gone = np.flatnonzero(ours & (pool.state == CACHED))
            self._forget(gone, everything=namespace is None)
            return int(np.count_nonzero(ours & (pool.state == DEAD)))

    def stats(self) -> CacheStats:
        """One consistent reading of all figures."""
        with self._lock:
            free, cached = self._pool.num_free, len(self._order)
            return CacheStats(
                num_blocks=self.num_blocks,
                free=free,
                cached=cached,
                held=self.num_blocks - free - cached,
                published=len(self._resident.index),
                leases=len(self._leases),
                eviction_age_s=self._eviction_age(),
                **vars(self._counters),
            )

    def snapshot(self) -> Snapshot:
        """All visible blocks now, with the sequence number they belong to."""
        with self._lock:
            return self._resident.snapshot(self.epoch, self.seq)

    def events_since(self, epoch: int | None, seq: int) -> EventBatch | None:
        """Events after `seq`, with eviction age and free share; None (gap, other epoch): take a snapshot."""
        with self._lock:
            events = self.events.since(epoch, seq)
            if events is None:
                return None
            share = self._pool.num_free / self.num_blocks
            return EventBatch(self.epoch, self.seq, tuple(events), self._eviction_age(), share)

    def check(self) -> None:
        """Prove that every figure and structure is consistent; slow, for tests.

        Raises `AssertionError` that names the first wrong block.
        """
        with self._lock:
            audit.check(self._pool, self._resident, self._order, self._leases)

    # --- All below runs under the lock. ---

    def _chain(self, namespace: Namespace) -> PrefixChain:
        return self.hasher.chain(self.block_size, self.hasher.root(namespace))

    def _hashes(
        self, tokens: Tokens, namespace: Namespace, hashes: Hashes | None
    ) -> tuple[Hashes, PrefixChain | None]:
        """Hashes of all full blocks, and the chain behind them if they were computed here. Needs no lock."""
        full = len(tokens) // self.block_size
        if hashes is None:
            chain = self._chain(namespace)
            return chain.extend(tokens[: full * self.block_size]), chain
        if hashes.dtype != np.uint64 or hashes.ndim != 1 or len(hashes) < full:
            raise InvalidRequest(f"hashes must be uint64[at least {full}]")
        return hashes[:full].copy(), None

    def _find(self, tokens: Tokens, hashes: Hashes, space: int) -> tuple[BlockIds, int, int]:
        """The hit: full blocks intp[d], a block to copy from (or -1) and how many of its tokens."""
        if space < 0:
            return _NO_BLOCKS, -1, 0
        most = len(tokens) - 1
        hit = self._resident.match(tokens, hashes[: most // self.block_size], space)
        parent = int(hit[-1]) if len(hit) else -1 - space
        start = len(hit) * self.block_size
        source, common = self._resident.partial(parent, tokens[start : min(start + self.block_size, most)])
        return hit, source, common

    def _available(self) -> int:
        return self._pool.num_free + len(self._order)

    def _affordable(
        self, num_tokens: int, hit: BlockIds, source: int, common: int
    ) -> tuple[BlockIds, int, int]:
        """The hit, without its partial end if pinning that block's source is what would not fit."""
        need = -(-num_tokens // self.block_size) - len(hit)
        refs = self._pool.refs
        available = self._available() - int(np.count_nonzero(refs[hit] == 0))
        if source >= 0 and refs[source] == 0 and need > available - 1:
            source, common = -1, 0
        if need > available:
            raise OutOfBlocks(need, available)
        return hit, source, common

    def _begin(self, lease: Lease, depth: int, source: int, common: int) -> None:
        """Enter a new lease and what it has hit."""
        lease.published = depth
        lease.cached_tokens = lease.computed = depth * self.block_size + common
        if source >= 0:
            lease.copy = BlockCopy(source, int(lease.blocks[depth]), common)
        self._leases.add(lease)
        counters = self._counters
        counters.claims += 1
        counters.hit_tokens += lease.cached_tokens
        counters.partial_hit_tokens += common
        counters.missed_tokens += len(lease) - lease.cached_tokens

    def _check_live(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise StaleLease("the lease was released, or belongs to another cache")

    def _pin(self, ids: BlockIds) -> None:
        """One holder more; hits leave the eviction order before any block is taken."""
        self._pool.refs[ids] += 1
        self._order.discard(ids)

    def _unpin(self, ids: BlockIds) -> None:
        """One holder less for distinct blocks, children before parents."""
        pool = self._pool
        left = pool.refs.take(ids) - 1
        pool.refs[ids] = left
        idle = ids[left == 0]
        visible = pool.state.take(idle) == CACHED
        cached = idle[visible]
        pool.last_use[cached] = self._clock()
        self._order.add(cached)
        pool.push_free(idle[~visible])

    def _take(self, count: int) -> BlockIds:
        """Blocks for a sequence's own use, free ones first, by rising id; the caller made sure of enough."""
        pool = self._pool
        ids = pool.pop_free(min(count, pool.num_free))
        if len(ids) < count:
            ids = np.concatenate((ids, self._evict(count - len(ids))))
        ids.sort()  # neighbours in the pool stay neighbours in the sequence, which attention reads faster
        pool.refs[ids] = 1
        return ids

    def _evict(self, count: int) -> BlockIds:
        victims = self._order.pop(count)
        self._resident.unpublish(victims)
        self._pool.state[victims] = PRIVATE
        self._counters.evictions += count
        self.events.removed(self._pool.hashes[victims], "evicted")
        return victims

    def _end_copy(self, lease: Lease) -> None:
        if lease.copy is not None:
            self._unpin(np.array([lease.copy.src]))
            lease.copy = None

    def _publish(self, lease: Lease, full: int) -> None:
        """Make blocks published..full-1 of a lease visible, or replace them by visible twins."""
        size, start = self.block_size, lease.published
        hashes, tokens = lease.hashes_to(full)[start:], lease.tokens[start * size : full * size]
        parent = int(lease.blocks[start - 1]) if start else -1 - lease.space
        twins, fresh = self._resident.twins(hashes, tokens, parent)
        same = len(twins)
        if same:
            self._replace(lease, start, twins)
            parent = int(twins[-1])
        if fresh:
            ids = lease.blocks[start + same : start + same + fresh].astype(np.intp)
            stored = hashes[same : same + fresh].copy()
            tokens = tokens[same * size : (same + fresh) * size]
            self._resident.publish(ids, stored, tokens, parent, lease.space)
            above = int(self._pool.hashes[parent]) if parent >= 0 else None
            self.events.stored(stored, above, self._resident.spaces.digest(lease.space))
            self._counters.stored += fresh
        lease.published = start + same + fresh
        if lease.published < full:
            lease.publishing = False
            self._counters.collisions += 1

    def _replace(self, lease: Lease, start: int, twins: BlockIds) -> None:
        """Hold published twins instead of the own copies from place `start` on."""
        table = lease.blocks[start : start + len(twins)]
        own = table[::-1].astype(np.intp)
        self._pin(twins)
        table[:] = twins
        self._unpin(own)
        self._counters.deduplicated += len(twins)

    def _forget(self, gone: BlockIds, everything: bool) -> None:
        """Remove visible blocks with all their descendants; held ones become DEAD."""
        pool = self._pool
        hashes = pool.hashes[gone]
        self._resident.unpublish(gone)
        idle = pool.refs[gone] == 0
        pool.state[gone] = DEAD
        self._order.discard(gone[idle])
        pool.push_free(gone[idle][::-1])
        self._counters.cleared += len(gone)
        if everything:
            self.events.cleared()
        elif len(gone):
            self.events.removed(hashes, "cleared")

    def _eviction_age(self) -> float | None:
        first = self._order.first()
        return None if first < 0 else self._clock() - float(self._pool.last_use[first])
