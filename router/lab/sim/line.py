"""The requests that wait at one replica, and how much of each its cache holds.

That is looked up when it is asked for, and again only if it may have changed since. A cached prefix grows
only by a block that is stored right behind it, and shrinks only if its last block goes: so requests are kept
by the hash of that block, and the cache's events tell whom to look at again.
"""

from collections import defaultdict
from collections.abc import Iterator

from kvcore.cache import PrefixCache
from kvcore.events import BlocksRemoved, BlocksStored
from router.lab.sim.request import SPACE, SimRequest

_INSIDE = -1  # key of hits that end inside a block: of which one is not known


class Line:
    """Requests in the order in which they are served, oldest first. The owner reads `requests` and leaves it
    alone; `attention` as in `Timing`."""

    def __init__(self, cache: PrefixCache, attention: float) -> None:
        self.requests: list[SimRequest] = []
        self.tokens = 0
        """What is left to compute of all of them, a token of each at least."""
        self._attention = attention
        self._cache = cache
        self._seq = cache.seq  # up to which events are accounted for
        self._known: dict[SimRequest, int | None] = {}  # whose hit is up to date: the hash that it ends with
        self._by_end: defaultdict[int | None, set[SimRequest]] = defaultdict(set)
        self._work: float | None = None  # where it is not summed up yet

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self.requests)

    @property
    def work(self) -> float:
        """What that costs, as `waiting_work` of a `LoadReport`."""
        if self._work is None:
            self._work = sum([request.work for request in self.requests])
        return self._work

    def append(self, request: SimRequest) -> None:
        """A request has come."""
        self._weigh(request, 1)
        self.requests.append(request)
        self.look(request)

    def put_back(self, request: SimRequest) -> None:
        """A request has lost its blocks: it is the next one again."""
        self._weigh(request, 1)
        self.requests.insert(0, request)

    def remove(self, request: SimRequest) -> None:
        """A request waits no more."""
        self._weigh(request, -1)
        self.requests.remove(request)
        self._forget(request)

    def leave(self) -> list[SimRequest]:
        """All leave, oldest first."""
        requests = self.requests.copy()
        for request in requests:
            self.remove(request)
        return requests

    def look(self, request: SimRequest) -> None:
        """See how much of a request is cached now."""
        self._follow_events()
        if request not in self._known:
            self._probe(request)

    def first(self, most: int) -> Iterator[SimRequest]:
        """The oldest ones, so many at most, each looked at when its turn comes."""
        self._follow_events()
        for request in self.requests[:most]:
            if request not in self._known:
                self._probe(request)
            yield request

    def _probe(self, request: SimRequest) -> None:
        hit = self._cache.probe(request.tokens, SPACE, request.hashes)
        if hit != request.hit:
            self._weigh(request, -1)
            request.hit = hit
            self._weigh(request, 1)
        depth, inside = divmod(hit, self._cache.block_size)
        end = int(request.hashes[depth - 1]) if depth else None
        self._known[request] = end
        self._by_end[end].add(request)
        if inside:
            self._by_end[_INSIDE].add(request)

    def _weigh(self, request: SimRequest, sign: int) -> None:
        total = request.num_tokens
        left = total - request.hit
        self.tokens += sign * left
        request.work = left * (1 + (total - left / 2) * self._attention)
        self._work = None

    def _follow_events(self) -> None:
        """Forget the hits that may be others by now."""
        if self._seq == self._cache.seq:
            return
        events = self._cache.events.since(self._cache.epoch, self._seq) if self._known else []
        self._seq = self._cache.seq
        if events is None:  # more than the log holds
            self._forget_all(list(self._known))
            return
        for event in events:
            if isinstance(event, BlocksStored):
                self._changed([event.parent])
            elif isinstance(event, BlocksRemoved):
                self._changed([*event.hashes.tolist(), _INSIDE])
            else:
                self._forget_all(list(self._known))

    def _changed(self, ends: list[int | None]) -> None:
        for end in ends:
            if end in self._by_end:
                self._forget_all(list(self._by_end[end]))

    def _forget_all(self, requests: list[SimRequest]) -> None:
        for request in requests:
            self._forget(request)

    def _forget(self, request: SimRequest) -> None:
        if request in self._known:
            for key in (self._known.pop(request), _INSIDE):
                self._by_end[key].discard(request)
                if not self._by_end[key]:
                    del self._by_end[key]
