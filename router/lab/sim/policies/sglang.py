"""`cache_aware` of SGLang's model gateway (sgl-model-gateway/src/policies/cache_aware.rs and tree.rs).

Load is the requests in flight. If it is out of balance,

    most - least > balance_abs_threshold and most > balance_rel_threshold * least,

the worker with the least gets the request. Else the worker that first got the longest matching prefix gets it
if more than `cache_threshold` of the prompt matches, and the least loaded one if not (the first of several;
earlier versions took the one with the smallest tree). Every prompt goes into the tree of its worker; every
`eviction_interval` seconds trees over `max_tree_size` characters lose leaves, least recently used first.

Defaults are those of the launcher (router_args.py): 0.3, 64, 1.5, 120 s, 2^26 characters. (Those of the
crate, for who embeds it, are 0.5, 32, 1.1, 30 s, 10,000.)

Not here: characters; the tree holds 16 tokens at a time (`prefix_tree`), and a token counts as 4 characters.
The refresh of one in eight matched nodes is left out: the insertion that follows refreshes their leaf.
"""

import random
from collections.abc import Callable

from router.lab.sim.policies.base import Blind
from router.lab.sim.policies.prefix_tree import TOKENS_PER_CHARACTER, PrefixTree, as_text
from router.lab.sim.request import SimRequest


class SglangCacheAware(Blind):
    """See the module docstring."""

    cache_threshold = 0.3
    balance_abs_threshold = 64
    balance_rel_threshold = 1.5
    eviction_interval_s = 120.0
    max_tree_size = 2**26 // (4 * TOKENS_PER_CHARACTER)

    def __init__(self, rng: random.Random, clock: Callable[[], float], block_size: int) -> None:
        super().__init__(rng, clock, block_size)
        self._tree = PrefixTree()
        self._evicted_at = 0.0

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        self._evict_when_due()
        text = as_text(request.tokens)
        replica = self._chosen(text)
        self._tree.insert(text, replica)
        return replica

    def joined(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().joined(replica)
        self._tree.add(replica)

    def left(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().left(replica)
        self._tree.remove(replica)

    def _chosen(self, text: str) -> int:
        loads = [self.inflight[replica] for replica in self.alive]
        least, most = min(loads), max(loads)
        if most - least <= self.balance_abs_threshold or most <= self.balance_rel_threshold * least:
            matched, holders = self._tree.match(text)
            if matched > self.cache_threshold * len(text):
                return holders[0]
        return self.alive[loads.index(least)]

    def _evict_when_due(self) -> None:
        now = self.clock()
        if now - self._evicted_at >= self.eviction_interval_s:
            self._evicted_at = now
            self._tree.evict(self.max_tree_size)
