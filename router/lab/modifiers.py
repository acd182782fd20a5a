"""Changes to a trace on its way from file to use: its clock, its lengths, when its sessions start.

Each takes requests and yields requests. Those that move sessions against each other need all of them at once,
and yield them in the order of time.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

from router.lab.errors import OptionError
from router.lab.record import Request

MAX_SPEED = 1e9
"""And as many times as slow: beyond, times are no longer told apart from 0 or infinity."""


def scaled(requests: Iterable[Request], factor: float) -> Iterator[Request]:
    """Prompts of block ids and their answers, `factor` times as long; text and tokens stay as they are."""
    for request in requests:
        if request.blocks is None or factor == 1:
            yield request
            continue
        answer = request.max_tokens
        yield replace(
            request,
            blocks=request.blocks.scaled(factor),
            max_tokens=None if answer is None else max(1, round(answer * factor)),
        )


def faster(requests: Iterable[Request], speed: float) -> Iterator[Request]:
    """The clock runs `speed` times as fast: arrivals and think times alike."""
    if not 1 / MAX_SPEED <= speed <= MAX_SPEED:
        raise OptionError(f"the speed must be a positive number up to {MAX_SPEED:g}, not {speed}")
    for request in requests:
        yield replace(
            request,
            timestamp_s=None if request.timestamp_s is None else request.timestamp_s / speed,
            think_s=None if request.think_s is None else request.think_s / speed,
        )


def in_time_order(requests: Iterable[Request]) -> list[Request]:
    """Sorted by time; requests without one follow what is before them."""
    keyed: list[tuple[float, int, Request]] = []
    latest = 0.0
    for request in requests:
        latest = latest if request.timestamp_s is None else request.timestamp_s
        keyed.append((latest, len(keyed), request))
    return [request for _, _, request in sorted(keyed, key=lambda key: key[:2])]


def with_starts(requests: Iterable[Request], gap_s: float, seed: int = 0) -> list[Request]:
    """Sessions without a clock get one: they start `gap_s` apart on average, a Poisson process by `seed`.

    Later turns follow the one before them at once, or after their think time. A request without a session is
    one of its own; what has a timestamp keeps it.
    """
    if not 0 <= gap_s < float("inf"):
        raise OptionError(f"the gap between sessions must be a time in seconds, not {gap_s}")
    rng = random.Random(f"with starts {seed}")
    starts: dict[str, float] = {}
    numbers, now, timed = count(), 0.0, []
    for request in requests:
        if request.timestamp_s is not None:
            timed.append(request)
            continue
        name = request.session_id or f"\0{next(numbers)}"
        if name in starts:
            starts[name] += request.think_s or 0.0  # the earliest: answers take a time that is not known here
            timed.append(replace(request, timestamp_s=starts[name], think_s=request.think_s or 0.0))
            continue
        starts[name] = now
        timed.append(replace(request, timestamp_s=now))
        now += rng.expovariate(1 / gap_s) if gap_s else 0.0
    return in_time_order(timed)


def with_arrivals(requests: Iterable[Request], arrivals: Iterable[Request]) -> list[Request]:
    """The requests, arriving as those of another trace: the n-th session starts when its n-th request comes.

    Turns keep their distance from the start of their session; a request without a session is one of its own,
    and so is a sub-agent.
    Where the other trace is too short it begins again, a mean gap after its last arrival.
    """
    times = sorted(arrival.timestamp_s for arrival in arrivals if arrival.timestamp_s is not None)
    if not times:
        raise OptionError("there are no timestamps in the trace of arrivals")
    lap_s = (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)
    moved: dict[str, tuple[float, float]] = {}  # of each session's latest turn, when it came and does now
    result, begun = [], 0
    for request in in_time_order(requests):
        session, before = request.session_id, None
        if session is not None:
            before = moved.get(session)
        if before is None:
            old = request.timestamp_s or 0.0
            lap, place = divmod(begun, len(times))
            new = times[place] - times[0] + lap * lap_s
            begun += 1
        else:
            old = before[0] if request.timestamp_s is None else request.timestamp_s
            new = before[1] + old - before[0]
        if session is not None:
            moved[session] = (old, new)
        result.append(replace(request, timestamp_s=new))
    return in_time_order(result)
