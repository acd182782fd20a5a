"""One cache for a whole fleet: what a trace's hit rate is when all replicas' blocks are one pool.

The real `PrefixCache` sees one request after the other at the times of the trace, under a virtual clock;
answers are not counted, nor are hits on parts of a block, which the bounds do not know either. Beside the
policies stand two bounds: a cache that never forgets, and one of the same size that knows the future and
always evicts the block whose next use is farthest (Belady, 1966). A block's next use is never later than its
children's, so the farthest one is a leaf, and the bound is that of a prefix cache too.
"""

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvcore.cache import PrefixCache
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from router.lab.blocks import TokenIds
from router.lab.errors import OptionError
from router.lab.record import Request

_SPACE = Namespace("pooled")


@dataclass(frozen=True)
class PooledOptions:
    """A pool of `blocks` blocks of `block_size` tokens; the clock of the trace runs `speed` times as fast.

    A prefix cache holds full blocks only. With `round_up` the last part of a prompt counts as a block too,
    as in simulators that work on the hash ids of a trace.
    """

    blocks: int
    block_size: int
    speed: float = 1.0
    round_up: bool = False

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.block_size < 1 or not self.speed > 0:
            raise OptionError("blocks, block size and speed must be positive")


@dataclass(frozen=True)
class Prompts:
    """The prompts of a trace, what counts of each, and when each comes (s)."""

    tokens: Sequence[TokenIds]
    lengths: Sequence[int]
    times: Sequence[float]

    @classmethod
    def of(cls, requests: Iterable[Request], options: PooledOptions) -> "Prompts":
        """From requests that bring token ids. Raises `OptionError` for others, and when there are none."""
        tokens, lengths, times = [], [], []
        for request in requests:
            known = request.known_tokens()
            if known is None:
                raise OptionError("a pooled simulation needs a trace with token ids or hash ids")
            lengths.append(len(known))
            times.append((request.timestamp_s or 0.0) / options.speed)
            spare = -len(known) % options.block_size if options.round_up else 0
            tokens.append(np.pad(known, (0, spare), mode="edge"))
        if not tokens:
            raise OptionError("the trace has no requests")
        return cls(tokens, lengths, times)

    def rate(self, hits: Iterable[int]) -> float:
        """Hit tokens over prompt tokens."""
        return sum(map(min, hits, self.lengths)) / sum(self.lengths)


def simulate_policy(prompts: Prompts, options: PooledOptions, policy: str) -> dict[str, float]:
    """Hit rate of one eviction policy, and the seconds that the simulation took."""
    now, started = 0.0, time.perf_counter()
    # One block more, for the token that follows each prompt so that a whole prompt can be a hit.
    blocks = options.blocks + 1
    cache = PrefixCache(blocks, options.block_size, _hasher(), policy=policy, clock=lambda: now)
    hits = []
    for number, (tokens, at) in enumerate(zip(prompts.tokens, prompts.times, strict=True)):
        now = at
        if len(tokens) > options.blocks * options.block_size:
            hits.append(0)  # no such cache could serve it
            continue
        lease = cache.claim(np.append(tokens, np.int32(-1 - number)), _SPACE)
        hits.append(lease.cached_tokens // options.block_size * options.block_size)
        cache.commit(lease, len(tokens))
        cache.release(lease)
    return {"hit_rate": prompts.rate(hits), "wall_seconds": round(time.perf_counter() - started, 3)}


def infinite(prompts: Prompts, options: PooledOptions) -> float:
    """Hit rate of a cache that never forgets a block."""
    seen: set[int] = set()
    hits = []
    for keys in _keys(prompts, options):
        hits.append(_known(keys, seen) * options.block_size)
        seen.update(keys)
    return prompts.rate(hits)


def optimum(prompts: Prompts, options: PooledOptions) -> float:
    """Hit rate of a cache of that size which knows the future."""
    requests = _keys(prompts, options)
    uses: dict[int, list[int]] = defaultdict(list)  # of each key, the requests that use it, latest first
    for number in range(len(requests) - 1, -1, -1):
        for key in requests[number]:
            uses[key].append(number)
    cached: dict[int, int] = {}  # key: its next use
    line: list[tuple[int, int, int]] = []  # (minus the next use, tie, key), some of them stale
    ties, hits = count(), []
    for keys in requests:
        hits.append(_known(keys, cached) * options.block_size)
        if len(keys) > options.blocks:
            continue
        for key in keys:
            uses[key].pop()
            cached[key] = uses[key][-1] if uses[key] else len(requests)
            heapq.heappush(line, (-cached[key], -next(ties), key))  # among equals the deepest goes first
        while len(cached) > options.blocks:
            due, _, key = heapq.heappop(line)
            if cached.get(key) == -due:
                del cached[key]
    return prompts.rate(hits)


def _keys(prompts: Prompts, options: PooledOptions) -> list[list[int]]:
    hasher = _hasher()
    root = hasher.root(_SPACE)
    return [hasher.block_hashes(tokens, options.block_size, root).tolist() for tokens in prompts.tokens]


def _hasher() -> PrefixHasher:
    return PrefixHasher(b"pooled simulation")


def _known(keys: list[int], cached: "set[int] | dict[int, int]") -> int:
    """How many leading keys are in a cache."""
    return next((i for i, key in enumerate(keys) if key not in cached), len(keys))
