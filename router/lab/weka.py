"""Sessions of coding agents as WEKA records them (callanjfox/kv-cache-tester), in two forms.

A session an object, one a file or one a line, sub-agents nested where they were started:

    {"id": "...", "block_size": 64, "hash_id_scope": "global" | "local", "requests": [
        {"t": s, "in": n, "out": m, "hash_ids": [...], "think_time": s, "api_time": s},
        {"type": "subagent", "t": s, "agent_id": "...", "requests": [...]}]}

or a request a line, ids as runs [first, count] of full blocks of 64 tokens:

    {"session_id": "...", "agent": "main", "t": s, "input_length": n, "output_length": m,
     "hash_ranges": [[1, 2], [27008, 172]], "think_time": s, "api_time": s}

`t` counts from the start of the session, and there is no clock for all sessions: they start as a Poisson
process (`TraceOptions.session_gap_s`). Sub-agents are sessions of their own, "ID/AGENT", and each is a closed
loop: a turn starts `think_time` after the end of the one before it. The times of sub-agents may count from
their own start. Ids of scope "local" mean something within their session only.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from router.lab.errors import TraceError
from router.lab.record import Json, Request
from router.lab.rows import GIVEN_BY, OnBad, Row, TraceOptions, refuse

_BLOCK_SIZE = 64
_LOCAL_IDS = 1 << 40
"""Ids of one session, where each has its own; more sessions than 2^23 would meet again."""


def sniff_sessions(data: Json) -> bool:
    """Whether the first row is a session with its requests."""
    return isinstance(data.get("requests"), list)


def sniff_requests(data: Json) -> bool:
    """Whether the first row is a request in the compact form."""
    return "hash_ranges" in data


def read_sessions(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of all sessions in the order of their times. A broken one is left out of its session."""
    return _in_time_order(_sessions(rows, options, bad), options)


def read_requests(rows: Iterator[Row], options: TraceOptions, bad: OnBad = refuse) -> Iterator[Request]:
    """The requests of the compact form in the order of their times."""
    return _in_time_order(_grouped(rows, options, bad), options)


@dataclass
class _Session:
    """Requests of a session so far, timed from its start."""

    name: str
    requests: list[Request] = field(default_factory=list)
    agents: dict[str, float] = field(
        default_factory=dict
    )  # what to add to the times of each, to be the session's
    last_s: float = 0.0  # when the main agent's last request began
    ended_s: float = 0.0  # and ended

    def append(self, row: Row, request: Request, agent: str) -> None:
        """Add a request of an agent; "" is the main one."""
        at = row.decimal("t")
        if at is None:
            raise row.error("no `t` (seconds)")
        think_s, api_s = row.decimal("think_time") or 0.0, row.decimal("api_time") or 0.0
        first = agent not in self.agents
        if first:  # a sub-agent before the request that called it: its times count from its own start
            self.agents[agent] = self.ended_s if agent and at < self.last_s else 0.0
        at += self.agents[agent]
        if not agent:
            self.last_s, self.ended_s = at, at + api_s
        name = f"{self.name}/{agent}" if agent else self.name
        self.requests.append(
            replace(request, timestamp_s=at, session_id=name, think_s=None if first else think_s)
        )


def _in_time_order(sessions: Iterable[_Session], options: TraceOptions) -> Iterator[Request]:
    """Sessions start one after the other, so only those are held of which requests are still to come."""
    waiting: list[tuple[float, int, Request]] = []
    ties = count()
    for session, start_s in zip(sessions, options.session_starts(), strict=False):
        while waiting and waiting[0][0] <= start_s:
            yield heapq.heappop(waiting)[2]
        for request in session.requests:
            at = start_s + (request.timestamp_s or 0.0)
            heapq.heappush(waiting, (at, next(ties), replace(request, timestamp_s=at)))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _grouped(rows: Iterator[Row], options: TraceOptions, bad: OnBad) -> Iterator[_Session]:
    """The sessions of the compact form, whose requests stand together."""
    session: _Session | None = None
    for row in rows:
        try:
            name = row.label("session_id") or ""
            if session is not None and name != session.name:
                yield session
                session = None
            session = session or _Session(name)
            agent, runs = row.label("agent") or "main", _runs(row)
            length = _length(row, "input_length", sum(run[1] for run in runs), options)
            blocks = options.runs(runs, options.block_size or _BLOCK_SIZE, length, own=row.number)
            request = Request(blocks=blocks, max_tokens=_answer(row, "output_length"))
            session.append(row, request, "" if agent == "main" else agent)
        except TraceError as error:
            bad(error)
    if session is not None:
        yield session


def _runs(row: Row) -> list[list[int]]:
    runs = row.data.get("hash_ranges")
    if not isinstance(runs, list) or not all(
        isinstance(run, list) and len(run) == 2 and all(type(n) is int and 0 <= n < 2**40 for n in run)
        for run in runs
    ):
        raise row.error("`hash_ranges` must be a list of [first id, count]")
    return runs


def _length(row: Row, name: str, ids: int, options: TraceOptions) -> int:
    """The prompt's tokens; there may be more of them than ids, but not less than they say."""
    length, size = row.count(name, minimum=1), options.block_size or _BLOCK_SIZE
    if length is None:
        raise row.error(f"no `{name}`")
    if ids * size >= length + size:
        raise row.error(f"{ids} hash ids do not fit {name} {length} by blocks of {size} ({GIVEN_BY})")
    return length


def _answer(row: Row, name: str) -> int | None:
    length = row.count(name)
    return None if length is None else max(1, length)


def _sessions(rows: Iterator[Row], options: TraceOptions, bad: OnBad) -> Iterator[_Session]:
    """The sessions of the nested form."""
    own = count(1)
    for number, row in enumerate(rows):
        try:
            session = _Session(row.label("id") or f"line {row.number}")
            parts = list(_flat(row))
            size = options.block_size or row.count("block_size", minimum=1) or _BLOCK_SIZE
            scope = row.text("hash_id_scope")
        except TraceError as error:
            bad(error)
            continue
        offset = (number + 1) * _LOCAL_IDS if scope == "local" else 0
        sized = replace(options, block_size=size)
        for agent, part in parts:
            try:
                session.append(part, _nested_request(part, sized, offset, next(own)), agent)
            except TraceError as error:
                bad(error)
        yield session


def _flat(row: Row, agent: str = "") -> Iterator[tuple[str, Row]]:
    """The requests in a session or sub-agent, each with its agent: "" for the main one."""
    for number, data in enumerate(row.objects("requests") or ()):
        part = row.inner(data)
        if "requests" in data:
            name = part.label("agent_id") or f"agent {number}"
            yield from _flat(part, f"{agent}/{name}" if agent else name)
        else:
            yield agent, part


def _nested_request(part: Row, options: TraceOptions, offset: int, own: int) -> Request:
    ids = part.hash_ids()
    length = _length(part, "in", len(ids), options)
    blocks = options.blocks(ids, options.block_size or _BLOCK_SIZE, length, own)
    if offset:
        runs = blocks.runs.copy()
        runs[runs[:, 0] >= 0, 0] += offset
        blocks = replace(blocks, runs=runs)
    return Request(blocks=blocks, max_tokens=_answer(part, "out"))
