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

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvcore.cache import PrefixCache
from router.lab.ideal import common_prefix
from router.lab.sim.request import SPACE, SimRequest
from router.lab.sim.sent import SentPrefixes

CLASSES = ("hit", "workload", "capacity", "routing", "staleness")
Caches = Mapping[int, PrefixCache]


@dataclass(frozen=True)
class _Arrival:
    """What was true, and what the router believed, when a request was placed; tokens from the beginning."""

    replica: int
    seen: int
    there: int
    believed_here: int
    believed_best: int


class Losses:
    """The account of one run: `placed` for each decision, `ended` for each request that was served.

    `tokens` has the sums by class.
    """

    def __init__(self, block_size: int) -> None:
        self.tokens: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self._block_size = block_size
        self._sent = SentPrefixes()
        self._open: dict[SimRequest, _Arrival] = {}
        self._on_way: defaultdict[int, dict[SimRequest, None]] = defaultdict(dict)  # `_open` by replica

    def placed(self, request: SimRequest, caches: Caches) -> None:
        """A request goes to `request.replica` now; `caches` are those of the replicas that take requests."""
        known = self._sent.find(request.hashes)
        here = self._resident(request, caches, request.replica)
        there = self._longest(request, caches, known, here)
        decision = request.decision
        self._open[request] = _Arrival(
            request.replica,
            seen=self._tokens(request, known[0][0] if known else 0),
            there=self._tokens(request, there),
            believed_here=self._tokens(request, here) if decision is None else decision.predicted_tokens,
            believed_best=self._tokens(request, there) if decision is None else decision.best_tokens,
        )
        self._on_way[request.replica][request] = None
        self._sent.add(request.hashes, request.replica)

    def lost(self, requests: Iterable[SimRequest]) -> None:
        """A replica died with these: they leave nothing there, and are placed anew or refused."""
        for request in requests:
            self._forget(request)

    def ended(self, request: SimRequest) -> None:
        """A request was served: its tokens are counted."""
        at = self._forget(request)
        if at is None:
            return
        total, hit = len(request.tokens), request.cached_tokens
        there = max(at.there, hit)
        seen = max(at.seen, there)
        routing = max(0, min(there, at.believed_best) - max(hit, at.believed_here))
        parts = (hit, total - seen, seen - there, routing, there - hit - routing)
        for name, tokens in zip(CLASSES, parts, strict=True):
            self.tokens[name] += tokens

    def finish(self) -> None:
        """No request comes any more: all but the sums is given up."""
        self._sent, self._open = SentPrefixes(), {}
        self._on_way.clear()

    def _forget(self, request: SimRequest) -> _Arrival | None:
        at = self._open.pop(request, None)
        if at is not None:
            del self._on_way[at.replica][request]
        return at

    def _longest(
        self, request: SimRequest, caches: Caches, known: Sequence[tuple[int, int]], here: int
    ) -> int:
        """The most leading blocks that any replica holds or is going to hold; `here` is the chosen one's.

        `known` says to which replicas how much of the prompt was sent, longest first.
        """
        best, asked = here, 1 << request.replica
        for depth, replicas in known:
            for replica in _bits(replicas & ~asked):
                if best >= depth:
                    return best
                asked |= 1 << replica
                if replica in caches:
                    best = max(best, self._resident(request, caches, replica))
        return best

    def _resident(self, request: SimRequest, caches: Caches, replica: int) -> int:
        """Leading blocks that a replica has or, by the requests that it has got already, is going to have."""
        hashes, total = request.hashes, len(request.tokens)
        found = caches[replica].probe(request.tokens, SPACE, hashes)
        depth = len(hashes) if found == total - 1 else found // self._block_size
        for other in self._on_way[replica]:
            # A hash stands for all the blocks before it too.
            if depth < min(len(hashes), len(other.hashes)) and other.hashes[depth] == hashes[depth]:
                depth = common_prefix(other.hashes, hashes)
        return depth

    def _tokens(self, request: SimRequest, depth: int) -> int:
        return min(depth * self._block_size, len(request.tokens) - 1)


def _bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1
