"""The sequences that decode on one replica: a step gives each a token, and costs the same for few or many.

When a sequence ends, and when it needs another block, follows from the number of steps alone. Between those
moments nobody asks for it, so it is not touched: what it got are the steps since it was counted last.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from router.lab.sim.request import SimRequest


@dataclass(eq=False, slots=True)
class _Member:
    """A sequence that decodes: its place in the order of joining, and the step up to which it is counted."""

    request: SimRequest
    number: int
    since: int


_Moments = list[tuple[int, int, _Member]]  # heap: the step at which a member, by its number, comes up


class Decodes:
    """Sequences in the order in which they joined. `computed` and `produced` of those requests are as of when
    they were counted: as they came up in `due`, or left."""

    def __init__(self, block_size: int) -> None:
        self.context = 0
        """Computed tokens of all of them: what the next step reads."""
        self._block_size = block_size
        self._members: dict[SimRequest, _Member] = {}
        self._numbers = count()
        self._newest = -1
        self._steps = 0
        self._coming: _Moments = []  # when each ends or needs a block
        self._ends: _Moments = []
        # While a step is being counted: its tokens, not yet got by members after `_passed` up to `_last`.
        self._late = 0
        self._last = self._passed = -1

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self._members)

    def add(self, request: SimRequest) -> None:
        """A request has got its first token, or the first one since it was put back, and needs more."""
        self._newest = next(self._numbers)
        member = _Member(request, self._newest, self._steps)
        self._members[request] = member
        self.context += request.computed
        end = self._steps + request.answer_tokens - request.produced
        heapq.heappush(self._ends, (end, member.number, member))

    def plan(self, request: SimRequest) -> None:
        """Say when a request that has blocks for its latest token is to come up again."""
        member = self._members[request]
        assert request.lease is not None
        room = len(request.lease.blocks) * self._block_size - request.num_tokens
        at = self._steps + min(room + 1, request.answer_tokens - request.produced)
        heapq.heappush(self._coming, (at, member.number, member))

    def until_end(self) -> int:
        """Steps until the first of them ends; there must be one."""
        while not self._is_here(self._ends[0][2]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._steps

    def step(self, steps: int) -> None:
        """So many steps are done. Whoever leaves before `due` has come to it has not got their tokens."""
        self._steps += steps
        self.context += steps * len(self._members)
        self._late, self._last, self._passed = steps, self._newest, -1

    def due(self) -> Iterator[SimRequest]:
        """Those that end or need a block now, counted, oldest first; they may leave meanwhile, others too."""
        up = []
        while self._coming and self._coming[0][0] <= self._steps:
            up.append(heapq.heappop(self._coming))
        for _, number, member in sorted(up, key=lambda moment: moment[1]):
            if self._is_here(member):
                self._passed = number
                self._count(member)
                yield member.request
        self._late = 0

    def remove(self, request: SimRequest) -> None:
        """A request leaves, counted."""
        member = self._members.pop(request)
        self.context -= request.computed + self._steps - member.since
        self._count(member)

    def pop(self) -> SimRequest:
        """The youngest leaves, counted."""
        youngest = next(reversed(self._members))
        self.remove(youngest)
        return youngest

    def leave(self) -> list[SimRequest]:
        """All leave, counted, oldest first."""
        requests = list(self._members)
        for request in requests:
            self.remove(request)
        return requests

    def _is_here(self, member: _Member) -> bool:
        return self._members.get(member.request) is member

    def _count(self, member: _Member) -> None:
        late = self._late if self._passed < member.number <= self._last else 0
        got = self._steps - member.since - late
        member.request.computed += got
        member.request.produced += got
        member.since = self._steps
