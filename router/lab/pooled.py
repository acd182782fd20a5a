"""One cache for a whole fleet: what a trace's hit rate is when all replicas' blocks are one pool.

The real `PrefixCache` sees one request after the other at the times of the trace, under a virtual clock;
answers are not counted, nor are hits on parts of a block, which the bounds do not know either. Beside the
policies stand two bounds: a cache that never forgets, and one of the same size that knows the future and
always evicts the block whose next use is farthest (Belady, 1966). A block's next use is never later than its
children's, so the farthest one is a leaf, and the bound is that of a prefix cache too.
"""

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from kvcore.cache import PrefixCache
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from router.lab.blocks import TokenIds
from router.lab.errors import OptionError
from router.lab.record import Request

_SPACE = Namespace("pooled")
_HASHER = PrefixHasher(b"pooled simulation")

Hashes = npt.NDArray[np.uint64]


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


class Prompts:
    """The prompts of a trace, what counts of each, and when each comes (s). Made anew at each use, so that
    the tokens of a long trace need no memory."""

    def __init__(self, requests: Sequence[Request], options: PooledOptions) -> None:
        """Raises `OptionError` when there are no requests."""
        if not requests:
            raise OptionError("the trace has no requests")
        self._requests, self._options = requests, options
        self.lengths = [prompt_length(request) for request in requests]
        self.times = [(request.timestamp_s or 0.0) / options.speed for request in requests]

    def tokens(self) -> Iterator[TokenIds]:
        """Of each prompt; of hash ids the same token for all of a block."""
        for request in self._requests:
            tokens = request.tokens() if request.blocks is None else request.blocks.stand_ins()
            spare = -len(tokens) % self._options.block_size if self._options.round_up else 0
            yield np.pad(tokens, (0, spare), mode="edge") if spare else tokens

    def block_keys(self) -> Iterator[Hashes]:
        """Of each prompt, the keys of its blocks: uint64[n]."""
        size = self._options.block_size
        for request, tokens in zip(self._requests, self.tokens(), strict=True):
            blocks = request.blocks
            if blocks is not None and blocks.size == size:
                yield blocks.keys()[: len(tokens) // size]
            else:
                yield _HASHER.block_hashes(tokens, size, _HASHER.root(_SPACE))

    def rate(self, hits: Iterable[int]) -> float:
        """Hit tokens over prompt tokens."""
        return sum(map(min, hits, self.lengths)) / sum(self.lengths)


def simulate_policy(prompts: Prompts, options: PooledOptions, policy: str) -> dict[str, float]:
    """Hit rate of one eviction policy, and the seconds that the simulation took."""
    now, started = 0.0, time.perf_counter()
    # One block more, for the token that follows each prompt so that a whole prompt can be a hit.
    blocks = options.blocks + 1
    cache = PrefixCache(blocks, options.block_size, _HASHER, policy=policy, clock=lambda: now)
    hits = []
    for number, (tokens, at) in enumerate(zip(prompts.tokens(), prompts.times, strict=True)):
        now = at
        if len(tokens) > options.blocks * options.block_size:
            hits.append(0)  # no such cache could serve it
            continue
        lease = cache.claim(np.append(tokens, np.int32(-1 - number)), _SPACE)
        hits.append(lease.cached_tokens // options.block_size * options.block_size)
        cache.commit(lease, len(tokens))
        cache.release(lease)
    return {"hit_rate": prompts.rate(hits), "wall_seconds": round(time.perf_counter() - started, 3)}


def infinite_hits(prompts: Prompts, options: PooledOptions) -> list[int]:
    """Hit tokens of each prompt in a cache that never forgets a block."""
    seen: set[int] = set()
    hits = []
    for keys in prompts.block_keys():
        names = keys.tolist()
        hits.append(_known(names, seen) * options.block_size)
        seen.update(names)
    return hits


def infinite(prompts: Prompts, options: PooledOptions) -> float:
    """Hit rate of a cache that never forgets a block."""
    return prompts.rate(infinite_hits(prompts, options))


def optimum(prompts: Prompts, options: PooledOptions) -> float:
    """Hit rate of a cache of that size which knows the future."""
    requests = list(prompts.block_keys())
    next_uses = _next_uses(requests)
    cached: dict[int, int] = {}  # key: its next use
    line: list[tuple[int, int, int]] = []  # (minus the next use, tie, key), some of them stale
    ties, hits = count(), []
    for keys, uses in zip(requests, next_uses, strict=True):
        names = keys.tolist()
        hits.append(_known(names, cached) * options.block_size)
        if len(names) > options.blocks:
            continue
        for key, use in zip(names, uses.tolist(), strict=True):
            cached[key] = use
            heapq.heappush(line, (-use, -next(ties), key))  # among equals the deepest goes first
        while len(cached) > options.blocks:
            due, _, key = heapq.heappop(line)
            if cached.get(key) == -due:
                del cached[key]
    return prompts.rate(hits)


def _next_uses(requests: Sequence[Hashes]) -> list[npt.NDArray[np.int64]]:
    """Of each block of each request, the number of the next request that has it too; as many as there are
    requests where none has."""
    lengths = [len(keys) for keys in requests]
    keys, owners = np.concatenate(requests), np.repeat(np.arange(len(requests)), lengths)
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    uses = np.full(len(keys), len(requests))
    uses[order[:-1][same]] = owners[order[1:][same]]
    return np.split(uses, np.cumsum(lengths)[:-1])


def prompt_length(request: Request) -> int:
    """Tokens of a prompt; of text, as they are estimated."""
    return len(request.tokens()) if request.num_tokens is None else request.num_tokens


def _known(keys: list[int], cached: "set[int] | dict[int, int]") -> int:
    """How many leading keys are in a cache."""
    return next((i for i, key in enumerate(keys) if key not in cached), len(keys))
