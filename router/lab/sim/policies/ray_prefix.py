"""`PrefixCacheAffinityRouter` of Ray Serve LLM (ray/llm/_internal/serve/routing_policies/prefix_aware, 2.60).

If the longest and the shortest queue differ by more than `imbalanced_threshold`, power of two choices. Else
the candidates are the replicas that got the longest matching prefix if at least `match_rate_threshold` of the
prompt matches, and those with the least text in the tree if not; the candidate with the shortest queue gets
the request, and the prompt goes into its tree.

Defaults: no imbalance is too large (infinity), 0.1, and nothing is ever evicted from the tree (`do_eviction`
is off). The tree is Ray's own `PrefixTree`, in this process, where it can be imported, and else ours, which
follows the same rules; Ray's compares characters one by one in Python, here they are compared faster.

Not here: characters (the tree holds 16 tokens at a time, see `prefix_tree`), locality and multiplexing, and
queue lengths that are out of date: a replica's queue is the requests that this router has sent there.
"""

import random
from collections.abc import Callable
from typing import Any, Protocol

from router.lab.sim.policies.base import Blind
from router.lab.sim.policies.prefix_tree import PrefixTree, as_text, shared
from router.lab.sim.request import SimRequest


class Tree(Protocol):
    """What the policy needs of a tree."""

    def add(self, holder: int) -> None:
        """A replica comes."""

    def remove(self, holder: int) -> None:
        """A replica goes."""

    def insert(self, text: str, holder: int) -> None:
        """A replica got a prompt."""

    def match(self, text: str) -> tuple[int, list[int]]:
        """Characters that match, and the replicas that got the last of them."""

    def smallest(self) -> list[int]:
        """The replicas with the least text."""


class OwnTree(PrefixTree):
    """Our tree, which can tell who has the least."""

    def smallest(self) -> list[int]:
        """See `Tree`."""
        least = min(self.sizes.values())
        return [holder for holder, size in self.sizes.items() if size == least]


class RaysTree:
    """Ray's tree. Raises ImportError where there is none."""

    def __init__(self, clock: Callable[[], float]) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_tree  # seconds to import

        self._tree: Any = type(
            "Tree", (prefix_tree.PrefixTree,), {"_shared_prefix_count": staticmethod(shared)}
        )()
        self._clock = clock

    def add(self, holder: int) -> None:
        """See `Tree`."""
        self._tree.add_tenants([str(holder)], self._clock())

    def remove(self, holder: int) -> None:
        """See `Tree`."""
        self._tree.remove_tenants([str(holder)])

    def insert(self, text: str, holder: int) -> None:
        """See `Tree`."""
        self._tree.insert(text, str(holder), self._clock())

    def match(self, text: str) -> tuple[int, list[int]]:
        """See `Tree`."""
        matched, holders = self._tree.prefix_match(text)
        return len(matched), [int(holder) for holder in holders or ()]

    def smallest(self) -> list[int]:
        """See `Tree`."""
        return [int(holder) for holder in self._tree.get_smallest_tenants() or ()]


class RayPrefix(Blind):
    """See the module docstring."""

    imbalanced_threshold = float("inf")
    match_rate_threshold = 0.1

    def __init__(self, rng: random.Random, clock: Callable[[], float], block_size: int) -> None:
        super().__init__(rng, clock, block_size)
        try:
            self.tree: Tree = RaysTree(clock)
        except ImportError:  # Ray without its LLM part
            self.tree = OwnTree()

    def choose(self, request: SimRequest) -> int:
        """See `Blind`."""
        text = as_text(request.tokens)
        replica = min(sorted(self._candidates(text)), key=self.inflight.__getitem__)
        self.tree.insert(text, replica)
        return replica

    def joined(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().joined(replica)
        self.tree.add(replica)

    def left(self, replica: int) -> None:
        """See `SimPolicy`."""
        super().left(replica)
        self.tree.remove(replica)

    def _candidates(self, text: str) -> list[int]:
        queues = [self.inflight[replica] for replica in self.alive]
        if max(queues) - min(queues) > self.imbalanced_threshold:
            return self.rng.sample(self.alive, min(2, len(self.alive)))
        matched, holders = self.tree.match(text)
        return holders if matched >= self.match_rate_threshold * len(text) else self.tree.smallest()
