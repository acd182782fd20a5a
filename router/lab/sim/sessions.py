"""Closed loops: a turn of a session is not sent before the one before it has ended."""

from collections import deque
from collections.abc import Iterable

from router.lab.record import Request


class Sessions:
    """Holds all turns but the first of each session back until it is their turn."""

    def __init__(self, requests: Iterable[Request]) -> None:
        """From all requests, in the order of their times."""
        self.open: list[Request] = []
        """First turns, and requests without a session: they come when the trace says."""
        self._turns: dict[str, deque[Request]] = {}
        for request in requests:
            name = request.session_id
            if name is None:
                self.open.append(request)
            elif name in self._turns:
                self._turns[name].append(request)
            else:
                self._turns[name] = deque()
                self.open.append(request)

    def ended(self, session: str | None, now: float) -> tuple[float, Request] | None:
        """A turn has ended: the next one of its session, if there is one, and when it comes."""
        turns = self._turns.get(session) if session is not None else None
        if not turns:
            return None
        request = turns.popleft()
        if request.think_s is not None:
            return now + request.think_s, request
        return max(now, request.timestamp_s or 0.0), request
