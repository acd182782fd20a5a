"""Which tokens to compute next: continuous batching over a prefix cache. No torch in here.

A step takes decodes first, then goes on with started prefills, then admits waiting sequences, oldest first,
until its token budget is spent (chunked prefill: Sarathi, arXiv:2308.16369). Half of what the decodes leave
is an express lane for prompts that it can finish in this step, shortest first: a prompt that is nearly all
cached does not wait behind a long one, and the oldest always gets the other half. When the pool has no block
left for a decode, the youngest running sequence gives its blocks back and is computed again later
(preemption by recompute, vLLM, arXiv:2309.06180); the oldest is thus never the victim of another, so it
always finishes.

Coalesced prefill: a waiting sequence whose next missing block is being computed by a running one waits for
it, and then hits the cache: a burst on a new system prompt computes it once.

The choices of one request stand in line as one. When the first has computed the prompt, the others fork its
lease and all draw from the same row of logits; blocks are copied only where their tokens part.

Draft tokens (see `replica.drafts`) take what budget and blocks are left when everybody has had theirs.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection

import numpy as np

from kvcore.cache import PrefixCache
from kvcore.errors import OutOfBlocks
from replica.drafts import Drafter
from replica.plan import Chunk, Plan
from replica.sequence import Sequence

_EXPRESS_LINE = 16
"""How far into the waiting line the express lane looks; each look probes the cache."""


def _age(seq: Sequence) -> int:
    return seq.order


class Scheduler:
    """Owns the waiting line and the running set, both in order of arrival, and the leases of what runs.

    Every sequence must fit into the pool on its own (the engine refuses longer ones), which is what
    guarantees progress. The cache must not be used for leases by anybody else.
    """

    def __init__(
        self,
        cache: PrefixCache,
        block_size: int,
        max_batch_tokens: int,
        max_num_seqs: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.cache = cache
        self.block_size = block_size
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.drafter = drafter
        self.preemptions = 0
        self._ahead = False

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run, those included that wait for another's prompt. For any thread."""
        return len(self.waiting) + sum(len(seq.forks) for seq in (*self.waiting, *self.running))

    def add(self, seq: Sequence) -> None:
        """Put a sequence in line, at the place of its order."""
        seq.hit = self._probe(seq)
        bisect.insort(self.waiting, seq, key=_age)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on where `parent` is computed: on its blocks, or from the line if there is no room.

        What `child` has of its own comes after the tokens that `parent` has computed.
        """
        child.hit, child.cached_tokens = parent.hit, parent.cached_tokens
        if parent.lease is None or len(self.running) >= self.max_num_seqs:
            bisect.insort(self.waiting, child, key=_age)
            return
        self.cache.commit(parent.lease, parent.computed)  # only what the cache knows to be computed is shared
        child.lease = self.cache.fork(parent.lease)
        child.recorded = child.computed = child.planned = parent.computed
        bisect.insort(self.running, child, key=_age)

    def resume(self, seq: Sequence) -> None:
        """A parked sequence has a token to compute again; without its blocks it gets in line."""
        seq.parked = False
        if seq.lease is None:
            self.add(seq)

    def schedule(self, ahead: bool = False) -> Plan:
        """Decide the next step, which must then be run; `complete` comes after it.

        `ahead`: another step is running, whose sequences keep their blocks. Empty only then, or when nothing
        is waiting or running.
        """
        plan, self._ahead = Plan(), ahead
        budget = self._decode(plan, self.max_batch_tokens)
        budget -= self._express(plan, budget // 2)
        budget = self._prefill(plan, budget)
        self._admit(plan, budget)
        while not plan.chunks and not ahead and self._take_from_parked():
            self._admit(plan, self.max_batch_tokens)
        self._draft(plan)
        for chunk in plan.chunks:
            chunk.seq.planned = chunk.end
            chunk.seq.pending += chunk.samples
        return plan

    def can_go_ahead(self) -> bool:
        """Whether a step can be scheduled while another one runs: nobody has to give blocks back for it."""
        return self.drafter is None and self.cache.available >= len(self.running)

    def complete(self, plan: Plan, spoiled: Collection[Sequence] = ()) -> None:
        """The plan's tokens are computed: publish the blocks that became full, fork for who waited.

        Chunks with drafts are left to `accept`; who was removed while the step ran is left alone. What was
        computed for `spoiled` sequences, whose logits are not finite, is shown to nobody.
        """
        for chunk in plan.chunks:
            if chunk.seq.lease is None:
                continue
            chunk.seq.pending -= chunk.samples
            if chunk.drafts or chunk.seq in spoiled:
                continue
            self._computed(chunk.seq, chunk.end)
            if chunk.samples:
                forks, chunk.seq.forks = chunk.seq.forks, []
                for fork in forks:
                    self.fork(chunk.seq, fork)

    def settle(self, chunk: Chunk, seq: Sequence, token: int) -> None:
        """What `seq` drew from a chunk is known: its lease hears of it if a later step counts on it."""
        if seq is chunk.seq and seq.lease is not None and seq.recorded > chunk.end:
            self.cache.settle(seq.lease, chunk.end, np.array([token], dtype=np.int32))

    def accept(self, chunk: Chunk, kept: int) -> None:
        """The answer has taken `kept` of the tokens drawn for a chunk with drafts: forget the other drafts.

        The KV of the last token drawn is not computed yet, that of the drafts before it is.
        """
        seq, end = chunk.seq, chunk.start + kept
        assert seq.lease is not None, "what is computed holds its blocks"
        self.cache.truncate(seq.lease, end)
        seq.recorded = seq.planned = end
        self._computed(seq, end)

    def _computed(self, seq: Sequence, end: int) -> None:
        assert seq.lease is not None, "what is computed holds its blocks"
        seq.computed = end
        # Nothing to tell between block boundaries, except that the source of a copy is free again.
        crossed = end // self.block_size > seq.lease.computed // self.block_size
        if crossed or seq.lease.copy is not None:
            self.cache.commit(seq.lease, end)

    def remove(self, seq: Sequence) -> None:
        """Forget a finished, failed or aborted sequence and free its blocks; unknown ones are ignored."""
        self._release(seq)
        for line in (self.waiting, self.running):
            if seq in line:
                line.remove(seq)

    def uncomputed_prompts(self) -> list[tuple[int, int]]:
        """What is still to be computed of prompts, waiting and running: from which token on, and how many.
        Expected hits are not counted."""
        waiting = [(seq.num_tokens, max(seq.num_tokens - seq.hit, 1)) for seq in self.waiting]
        running = [(seq.num_tokens, seq.num_tokens - seq.computed) for seq in self.running]
        return [(total - left, left) for total, left in waiting + [pair for pair in running if pair[1] > 1]]

    def _decode(self, plan: Plan, budget: int) -> int:
        for seq in list(self.running):
            # `lease` is None once an older sequence of this loop has taken this one's blocks.
            if seq.lease is not None and seq.remaining == 1 and budget > 0 and self._grow(seq, plan):
                plan.add(seq, 1)
                budget -= 1
        return budget

    def _express(self, plan: Plan, lane: int) -> int:
        """Finish the prompts with the least left, `lane` tokens at most; returns the tokens taken."""
        waiting = self._ready_in_line()
        prefills = [seq for seq in self.running if seq.remaining > 1]
        if len(waiting) + len(prefills) < 2:
            return 0  # nobody to overtake
        spent = 0
        for left, seq in sorted(
            ((seq.num_tokens - max(seq.hit, seq.planned), seq) for seq in waiting + prefills),
            key=lambda entry: entry[0],
        ):
            if spent + left > lane:
                break
            if seq.lease is None:
                if self._computed_elsewhere(seq):
                    continue  # by one that this very loop has admitted
                if len(self.running) >= self.max_num_seqs or not self._claim(seq, plan):
                    break
            if spent + seq.remaining <= lane:  # what was seen in the cache may be gone by the claim
                spent += seq.remaining
                plan.add(seq, seq.remaining)
        return spent

    def _ready_in_line(self) -> list[Sequence]:
        """The first of the waiting line that need not wait for another; none while the first lacks blocks."""
        ready: list[Sequence] = []
        for seq in self.waiting[:_EXPRESS_LINE]:
            seq.hit = self._probe(seq)
            if self._computed_elsewhere(seq):
                continue
            if not ready and self.running and self._short_of_blocks(seq):
                return []  # nobody overtakes the one that lacks blocks
            ready.append(seq)
        return ready

    def _prefill(self, plan: Plan, budget: int) -> int:
        planned = {chunk.seq for chunk in plan.chunks}
        for seq in self.running:
            if seq.remaining > 1 and budget > 0 and seq not in planned:
                count = min(budget, seq.remaining)
                plan.add(seq, count)
                budget -= count
        return budget

    def _admit(self, plan: Plan, budget: int) -> None:
        for seq in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                return
            seq.hit = self._probe(seq)
            if self._computed_elsewhere(seq):
                continue
            if not self._claim(seq, plan):
                return  # first come, first served: nobody overtakes the one that lacks blocks
            count = min(budget, seq.remaining)
            plan.add(seq, count)
            budget -= count

    def _probe(self, seq: Sequence) -> int:
        if not seq.request.read:
            return 0
        return self.cache.probe(seq.tokens(), seq.namespace, hashes=seq.known_hashes())

    def _computed_elsewhere(self, seq: Sequence) -> bool:
        """Whether a running sequence is computing the next block this one lacks, and will publish it.

        The owner's prefill goes on in every step, so the wait ends; if the owner is aborted or preempted it
        is no longer running, and the wait ends too.
        """
        missing = seq.hit // self.block_size
        if not seq.request.read or missing >= len(seq.hashes):
            return False
        wanted, end = seq.hashes[missing], (missing + 1) * self.block_size
        return any(
            other.request.publish and other.computed < end and len(other.hashes) > missing
            and other.hashes[missing] == wanted
            for other in self.running
        )  # fmt: skip

    def _claim(self, seq: Sequence, plan: Plan) -> bool:
        request = seq.request
        if self.running and self._short_of_blocks(seq):
            return False
        tokens, hashes = seq.tokens(), seq.known_hashes()
        try:
            lease = self.cache.claim(
                tokens,
                seq.namespace,
                hashes=hashes,
                read=request.read,
                publish=request.publish,
                retention=request.retention,
            )
        except OutOfBlocks:
            if not self.running:
                raise  # alone it must fit: somebody else holds blocks
            return False
        seq.lease, seq.recorded = lease, len(tokens)
        seq.computed = seq.planned = lease.cached_tokens
        if seq.cached_tokens is None:
            seq.cached_tokens = lease.cached_tokens
        plan.copy(lease.copy)
        self.waiting.remove(seq)
        bisect.insort(self.running, seq, key=_age)
        return True

    def _short_of_blocks(self, seq: Sequence) -> bool:
        """Whether admission would leave running sequences without a block each to grow into.

        Only a guard against admitting what the next step would preempt; `claim` has the last word.
        """
        needed = -(-seq.num_tokens // self.block_size) - seq.hit // self.block_size
        return needed + len(self.running) > self.cache.available

    def _grow(self, seq: Sequence, plan: Plan) -> bool:
        """Make room for the newest token at the cost of the youngest; False when that is `seq` itself.

        False, too, when there is none and nobody may lose blocks.
        """
        while seq.lease is not None:
            if seq.recorded == seq.num_tokens + seq.pending:
                return True
            before = seq.lease.copy
            try:
                self.cache.append(seq.lease, seq.to_record())
            except OutOfBlocks:
                if self._ahead:
                    return False
                self._preempt(self.running[-1])
                continue
            seq.recorded = seq.num_tokens + seq.pending
            if seq.lease.copy is not before:
                plan.copy(seq.lease.copy)  # where its tokens part from those it shared a block with
        return False

    def _draft(self, plan: Plan) -> None:
        """Let decodes check guesses too, with budget and blocks that nobody has asked for in this step."""
        if self.drafter is None:
            return
        for place, chunk in enumerate(plan.chunks):
            if chunk.count != 1 or not chunk.samples:
                continue
            drafts = self.drafter.guess(chunk.seq, self.max_batch_tokens - plan.num_tokens)
            if not len(drafts):
                continue
            assert chunk.seq.lease is not None, "what is planned holds its blocks"
            try:
                self.cache.append(chunk.seq.lease, drafts)
            except OutOfBlocks:
                return
            plan.draft(place, tuple(drafts.tolist()))

    def _take_from_parked(self) -> bool:
        """Free the blocks of the youngest parked beam for who waits; False if there is none."""
        parked = [seq for seq in self.running if seq.parked]
        if not parked or not self.waiting:
            return False
        self._preempt(parked[-1])
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.preemptions += 1
        self._release(seq)
        self.running.remove(seq)
        if not seq.parked:
            bisect.insort(self.waiting, seq, key=_age)

    def _release(self, seq: Sequence) -> None:
        if seq.lease is not None:
            self.cache.release(seq.lease)
        seq.lease, seq.recorded, seq.computed, seq.planned, seq.pending = None, 0, 0, 0, 0
