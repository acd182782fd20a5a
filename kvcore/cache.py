"""The prefix cache of one engine: which KV blocks hold what, who uses them, and which go next.

A sequence's life is `claim` (pin the hit, take the blocks it needs, or change nothing), `append` and `commit`
in turns, `release`. `fork` splits it, `truncate` takes back tokens that turned out wrong. Only `commit` makes
blocks visible, after their KV was really written; only full blocks become visible. The cache handles block
ids and tokens, never KV itself.

Threads: every method may be called from any thread; a lease is used by one thread at a time. Methods that
change something take turns, for microseconds in a sequence's life and milliseconds in a clear. `probe` waits
for nobody: it is one compiled call, which sees the tree as the latest such call has left it.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvcore import audit, match
from kvcore.arrays import BlockIds, Hashes, Tokens, as_tokens, plain
from kvcore.errors import InvalidRequest, OutOfBlocks, StaleLease
from kvcore.events import EventBatch, EventLog
from kvcore.explain import Explanation, explain
from kvcore.hashing import PrefixHasher
from kvcore.lease import Lease, Prompt
from kvcore.namespace import Namespace
from kvcore.occupancy import NO_HIT, Hit, Occupancy
from kvcore.retention import Retention, in_order
from kvcore.snapshot import Snapshot, take_snapshot
from kvcore.stats import CacheStats, Room


class PrefixCache:
    """A pool of `num_blocks` blocks of `block_size` tokens with a prefix tree over the published ones.

    `policy` names the eviction order (see `kvcore.eviction`); `clock` returns seconds. `epoch` names this
    life of the cache in its events (default: random); `events` brings an own log instead, with its epoch.

    Raises `InvalidRequest` for sizes below 1, an unknown policy, or an epoch that contradicts the log's.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: PrefixHasher,
        *,
        policy: str = "reuse",
        clock: Callable[[], float] = time.monotonic,
        epoch: int | None = None,
        events: EventLog | None = None,
    ) -> None:
        if events is None:
            number = secrets.randbits(62) + 1 if epoch is None else epoch
            events = EventLog(number, capacity=max(num_blocks // 4, 1024))
        elif epoch not in (None, events.epoch):
            raise InvalidRequest(f"epoch {epoch} is not that of the event log, {events.epoch}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hasher = hasher
        self.events = events
        self._state = Occupancy(num_blocks, block_size, policy, clock, events)
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
        return self._state.pool.nbytes

    @property
    def available(self) -> int:
        """Blocks that are free or can be evicted now. Never waits for another thread."""
        return self._state.available

    def probe(self, tokens: Tokens, namespace: Namespace, hashes: Hashes | None = None) -> int:
        """How many leading tokens of int32[n] a claim would find now; at most n - 1. Changes nothing.

        `hashes` as in `Prompt`. Never waits for another thread.
        """
        tokens = as_tokens(tokens)
        if len(tokens) == 0:
            return 0
        if hashes is None:
            hashes = self.hasher.block_hashes(tokens, self.block_size, self.hasher.root(namespace))
        hashes = self._checked(hashes, tokens)
        table: BlockIds = np.empty(len(hashes), dtype=np.int32)
        space = self._state.spaces.find(namespace.digest())
        depth, _, common = match.find(self._state.pool, tokens, hashes, space, table)
        return depth * self.block_size + common

    def claim(
        self,
        tokens: Tokens,
        namespace: Namespace,
        *,
        hashes: Hashes | None = None,
        read: bool = True,
        publish: bool = True,
        retention: Sequence[Retention] = (),
    ) -> Lease:
        """Pin the longest cached prefix of int32[n] and take blocks for all n tokens; options as in `Prompt`.

        At least the last token is left to compute.

        Raises `OutOfBlocks` when the pool cannot hold the sequence now: nothing has changed then.
        Raises `InvalidRequest` for no tokens, or an argument of a wrong type, shape or range.
        """
        lease = self._lease(Prompt(tokens, namespace, hashes, read, publish, tuple(retention)))
        with self._lock:
            self._state.admit(lease, self._pin_hit(lease))
        return lease

    def claim_many(self, prompts: Sequence[Prompt]) -> list[Lease | None]:
        """Claim for a batch: every member's hit is safe before any member takes blocks, first ones first.

        A member that finds too few blocks gets None, and nothing has changed for it. Raises `InvalidRequest`
        as `claim`, before anything has changed.
        """
        leases = [self._lease(prompt) for prompt in prompts]
        with self._lock:
            hits = [self._pin_hit(lease) for lease in leases]
            return [self._admitted(*pair) for pair in zip(leases, hits, strict=True)]

    def append(self, lease: Lease, tokens: Tokens) -> None:
        """Record more tokens int32[m] of a sequence and take the blocks they need.

        Where the sequence would go on inside a block that others hold or hit, it gets a block of its own and
        `lease.copy` says what to copy there.

        Raises `OutOfBlocks` when there are too few: nothing has changed then. Raises `StaleLease`,
        `InvalidRequest`.
        """
        tokens = as_tokens(tokens)
        with self._lock:
            self._check_live(lease)
            self._state.append(lease, tokens)

    def settle(self, lease: Lease, start: int, tokens: Tokens) -> None:
        """Tell what tokens int32[m] from place `start` on are, which were recorded before that was known.

        Raises `StaleLease`; `InvalidRequest` for tokens that are not recorded, or committed already.
        """
        tokens = as_tokens(tokens)
        with self._lock:
            self._check_live(lease)
            if not lease.computed <= start <= len(lease) - len(tokens):
                end = start + len(tokens)
                raise InvalidRequest(f"tokens {start}..{end} are not in {lease.computed}..{len(lease)}")
            lease.settle(start, tokens)

    def commit(self, lease: Lease, computed: int) -> None:
        """The KV of the first `computed` tokens is written, all of it: make the full blocks visible.

        Where an identical block is visible already, the block table gets that one instead of the own copy.
        A commit also ends the pin on `lease.copy`'s source. Blocks claimed before a `clear` of their
        namespace stay invisible.

        Raises `StaleLease`; `InvalidRequest` when `computed` goes back or beyond the recorded tokens.
        """
        with self._lock:
            self._check_live(lease)
            if not lease.computed <= computed <= len(lease):
                raise InvalidRequest(f"computed {computed} is not in {lease.computed}..{len(lease)}")
            lease.computed = computed
            self._state.end_copy(lease)
            full = computed // self.block_size
            if full > lease.published and lease.publishing:
                self._state.publish(lease, full)

    def fork(self, lease: Lease) -> Lease:
        """A second sequence on the computed tokens of the first, for beams and parallel answers.

        It shares all their blocks, a last partial one too: whoever appends to that first gets a copy. Takes
        no block, so it cannot fail for want of any.

        Raises `StaleLease`; `InvalidRequest` while `lease.copy` is still to be done.
        """
        with self._lock:
            self._check_live(lease)
            if lease.copy is not None:
                raise InvalidRequest("a lease with a copy to be done cannot be forked: commit it first")
            return self._state.fork(lease)

    def truncate(self, lease: Lease, length: int) -> None:
        """Take back all tokens after the first `length`, such as rejected drafts, and free their blocks.

        What is published stays so, for others. Raises `StaleLease`; `InvalidRequest` for a length below 1 or
        beyond the recorded tokens.
        """
        with self._lock:
            self._check_live(lease)
            if not 1 <= length <= len(lease):
                raise InvalidRequest(f"length {length} is not in 1..{len(lease)}")
            self._state.end_copy(lease)
            self._state.drop(lease.cut(length))

    def release(self, lease: Lease) -> None:
        """Let go of a sequence: its visible blocks can be evicted from now on, tails first. Idempotent."""
        with self._lock:
            if lease in self._state.leases:
                self._state.leave(lease)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget all blocks, or those of one namespace; none can be hit any more.

        Returns how many of them are still held by sequences: those die with their last holder. Sequences
        claimed before the call publish nothing after it.
        """
        with self._lock:
            return self._state.clear(None if namespace is None else namespace.digest())

    def explain(self, tokens: Tokens, namespace: Namespace) -> Explanation:
        """How long the hit of int32[n] would be now, and why it ends there. Changes nothing."""
        with self._lock:
            return explain(self._state, self.hasher, as_tokens(tokens), namespace)

    def room(self) -> Room:
        """How full the cache is: one consistent reading, in a third of the time that `stats` takes."""
        with self._lock:
            return self._room()

    def stats(self) -> CacheStats:
        """One consistent reading of all figures."""
        with self._lock:
            state = self._state.pool.state[0]
            sums = ("published", "evictions", "idle_s", "regrets", "regret_s", "block_seconds")
            return CacheStats(
                num_blocks=self.num_blocks,
                leases=len(self._state.leases),
                **vars(self._room()),
                **{name: state[name].item() for name in sums},
                **vars(self._state.counters),
            )

    def snapshot(self) -> Snapshot:
        """All visible blocks now, with the sequence number they belong to."""
        with self._lock:
            return take_snapshot(self._state, self.epoch, self.seq)

    def events_since(self, epoch: int | None, seq: int) -> EventBatch | None:
        """Events after `seq`, with eviction age and free share; None (gap, other epoch): take a snapshot."""
        with self._lock:
            events = self.events.since(epoch, seq)
            if events is None:
                return None
            share = self._state.free / self.num_blocks
            return EventBatch(self.epoch, self.seq, tuple(events), self._state.eviction_age_s, share)

    def check(self) -> None:
        """Prove that every figure and structure is consistent; slow, for tests.

        Raises `AssertionError` that names the first wrong block.
        """
        with self._lock:
            audit.check(self._state)

    def _lease(self, prompt: Prompt) -> Lease:
        """A lease that holds nothing yet. Raises `InvalidRequest`."""
        tokens = as_tokens(prompt.tokens)
        if len(tokens) == 0:
            raise InvalidRequest("a claim needs at least one token")
        hashes = None if prompt.hashes is None else self._checked(prompt.hashes, tokens)
        if prompt.retention:
            prompt = prompt._replace(retention=in_order(prompt.retention))
        lease = Lease(prompt._replace(tokens=tokens, hashes=hashes), self.hasher, self.block_size)
        if prompt.read or prompt.publish:
            lease.hashes_to(len(tokens) // self.block_size)
        return lease

    def _checked(self, hashes: Hashes, tokens: Tokens) -> Hashes:
        full = len(tokens) // self.block_size
        known = isinstance(hashes, np.ndarray) and hashes.dtype == np.uint64 and hashes.ndim == 1
        if not known or len(hashes) < full:
            raise InvalidRequest(f"hashes must be uint64[at least {full}]")
        return plain(hashes[:full])

    # --- Runs under the lock. ---

    def _pin_hit(self, lease: Lease) -> Hit:
        return self._state.pin_hit(lease) if lease.reading else NO_HIT

    def _admitted(self, lease: Lease, hit: Hit) -> Lease | None:
        try:
            self._state.admit(lease, hit)
        except OutOfBlocks:
            return None
        return lease

    def _room(self) -> Room:
        free, available = self._state.free, self._state.available
        return Room(free, available - free, self.num_blocks - available, self._state.eviction_age_s)

    def _check_live(self, lease: Lease) -> None:
        if lease not in self._state.leases:
            raise StaleLease("the lease was released, or belongs to another cache")
