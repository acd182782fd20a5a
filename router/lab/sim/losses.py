"""Where prompt tokens were not hit, and whose doing it was: the workload, capacity, routing or staleness.

Every prompt token of a request that was served is in exactly one class. With n prompt tokens, of which the
first `hit` were cached when the replica claimed blocks for them::

    0 ......... hit ............... there ............. seen ............. n
      hit         routing, staleness       capacity          workload

seen: the longest prefix, in full blocks, of any earlier prompt; at most n - 1, since the last token is always
computed. there: the longest prefix that some replica held when the request came, or that requests on their
way there would have left behind. Nobody could have hit what lies beyond `seen`, and no router what lies
beyond `there`. Between `hit` and `there` a token is a loss of routing if the router believed that a replica
held it and knowingly chose one of which it did not; else of staleness: it knew of no holder, or believed in
one that had lost it by the time of the claim. Policies that do not tell what they believe are taken to know
the truth: what was elsewhere when they decided is routing.

An exact account, without asking every cache: a prefix can be resident only where a request with it was sent,
and the replicas to which the longest known prefix was sent are asked first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcore.cache import PrefixCache
from router.lab.sim.replica import SPACE
from router.lab.sim.request import SimRequest

CLASSES = ("hit", "workload", "capacity", "routing", "staleness")


@dataclass(frozen=True)
class _Arrival:
    """What was true, and what the router believed, when a request was placed; tokens from the beginning."""

    replica: int
    keys: Sequence[int]
    seen: int
    there: int
    believed_here: int
    believed_best: int


class Losses:
    """The account of one run: `placed` for each decision, `ended` for each request that was served.

    `tokens` has the sums by class. Memory: a number for each distinct block that was asked for.
    """

    def __init__(self, block_size: int) -> None:
        self.tokens: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self._block_size = block_size
        self._sent: dict[int, int] = {}  # block: bit mask of the replicas it was sent to
        self._on_way: list[Counter[int]] = []  # by replica: blocks of requests that have not ended
        self._open: dict[SimRequest, _Arrival] = {}

    def placed(self, request: SimRequest, caches: Sequence[PrefixCache]) -> None:
        """A request goes to `request.replica` now; `caches` are all replicas'. Again if it is sent anew."""
        self._forget(request)
        self._on_way.extend(Counter() for _ in range(len(caches) - len(self._on_way)))
        keys = request.hashes.tolist()
        known = next((i for i, key in enumerate(keys) if key not in self._sent), len(keys))
        here = self._resident(request, keys, caches, request.replica)
        there = max(here, self._longest(request, keys[:known], caches, 1 << request.replica, here))
        decision = request.decision
        self._open[request] = _Arrival(
            request.replica,
            keys,
            seen=self._tokens(request, known),
            there=self._tokens(request, there),
            believed_here=self._tokens(request, here) if decision is None else decision.predicted_tokens,
            believed_best=self._tokens(request, there) if decision is None else decision.best_tokens,
        )
        for key in keys:
            self._sent[key] = self._sent.get(key, 0) | 1 << request.replica
        self._on_way[request.replica].update(keys)

    def ended(self, request: SimRequest) -> None:
        """A request was served: its tokens are counted."""
        at = self._forget(request)
        if at is None:
            return
        total, hit = len(request.tokens), request.cached_tokens
        there = max(at.there, hit)
        seen = max(at.seen, there)
        given_up = min(there, at.believed_best) - max(hit, at.believed_here)
        routing = max(0, given_up)
        parts = (hit, total - seen, seen - there, routing, there - hit - routing)
        for name, tokens in zip(CLASSES, parts, strict=True):
            self.tokens[name] += tokens

    def finish(self) -> None:
        """No request comes any more: all but the sums is given up."""
        self._sent, self._on_way, self._open = {}, [], {}

    def _forget(self, request: SimRequest) -> _Arrival | None:
        at = self._open.pop(request, None)
        if at is not None:
            on_way = self._on_way[at.replica]
            on_way.subtract(at.keys)
            for key in at.keys:
                if not on_way[key]:
                    del on_way[key]
        return at

    def _longest(
        self, request: SimRequest, keys: Sequence[int], caches: Sequence[PrefixCache], asked: int, best: int
    ) -> int:
        """How many of the leading blocks any replica holds or will hold, if more than `best`.

        `keys` were all sent before. Replicas whose bit is in `asked` are left out.
        """
        for depth in range(len(keys), 0, -1):
            if best >= depth:
                break
            for replica in _bits(self._sent[keys[depth - 1]] & ~asked):
                asked |= 1 << replica
                best = max(best, self._resident(request, keys, caches, replica))
                if best >= depth:
                    break
        return best

    def _resident(
        self, request: SimRequest, keys: Sequence[int], caches: Sequence[PrefixCache], replica: int
    ) -> int:
        """Leading blocks that a replica has or, by the requests that it has got already, is going to have."""
        size, total = self._block_size, len(request.tokens)
        found = caches[replica].probe(request.tokens, SPACE, request.hashes)
        depth = len(keys) if found == total - 1 else found // size
        on_way = self._on_way[replica]
        while depth < len(keys) and keys[depth] in on_way:
            depth += 1
        return depth

    def _tokens(self, request: SimRequest, depth: int) -> int:
        return min(depth * self._block_size, len(request.tokens) - 1)


def _bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
