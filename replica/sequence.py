"""One choice of one request while it lives in the engine: its tokens, its blocks, how far it is computed."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcore.namespace import Namespace
from replica.request import Request, SamplingParams

if TYPE_CHECKING:
    from kvcore.lease import Lease

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(eq=False)
class Sequence:
    """Tokens are owned here and survive preemption; blocks are owned by `lease`, which does not.

    Attributes:
        request: whose choice this is.
        index: which choice.
        namespace: the cache namespace of the request.
        hashes: uint64[len(prompt) // block_size], prefix hashes of the prompt's full blocks.
        seed: 64-bit seed of this choice's draws.
        order: place in the line; lower is older.
        outputs: sampled tokens.
        lease: the blocks held, None while waiting.
        recorded: tokens the lease knows of.
        computed: leading tokens whose KV is in the blocks.
        planned: the same once all steps are done that are scheduled; `computed` when none is running.
        pending: tokens that running steps draw; they are not in `outputs` yet.
        longest: most tokens the answer can have.
        hit: leading tokens the cache was last seen to hold for this prompt (an estimate while waiting).
        cached_tokens: prompt tokens served from the cache at the first claim; later claims do not change it.
        forks: choices of the same request that wait until this one's prompt is computed.
        parked: a beam that has all it needs until the other beams of its request have it too: there is
            nothing to compute for it, and it can do without its blocks.
        finish_reason: why the choice has ended, None while it goes on.
    """

    request: Request
    index: int
    namespace: Namespace
    hashes: npt.NDArray[np.uint64]
    seed: int
    order: int
    outputs: list[int] = field(default_factory=list)
    lease: Lease | None = None
    recorded: int = 0
    computed: int = 0
    planned: int = 0
    pending: int = 0
    longest: int = sys.maxsize
    hit: int = 0
    cached_tokens: int | None = None
    forks: list[Sequence] = field(default_factory=list)
    parked: bool = False
    finish_reason: str | None = None

    @property
    def sampling(self) -> SamplingParams:
        """How to draw its tokens."""
        return self.request.sampling

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens."""
        return len(self.request.tokens) + len(self.outputs)

    @property
    def remaining(self) -> int:
        """Tokens still to schedule before the next one can be sampled; 1 when decoding, 0 when parked, and
        while the last one that the answer can have is drawn."""
        if self.pending and len(self.outputs) + self.pending >= self.longest:
            return 0
        return self.num_tokens + self.pending - self.planned

    def tokens(self) -> npt.NDArray[np.int32]:
        """int32[num_tokens], prompt and sampled tokens."""
        if not self.outputs:
            return self.request.tokens
        return np.concatenate([self.request.tokens, np.array(self.outputs, dtype=np.int32)])

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """int32[stop - start], without building the rest."""
        prompt = self.num_prompt
        if stop <= prompt:
            return self.request.tokens[start:stop]
        if start >= prompt:
            return np.array(self.outputs[start - prompt : stop - prompt], dtype=np.int32)
        return self.tokens()[start:stop]

    def to_record(self) -> npt.NDArray[np.int32]:
        """int32[n]: what the lease does not know of; 0 for what is not known yet."""
        known = self.slice(self.recorded, max(self.recorded, self.num_tokens))
        unknown = self.num_tokens + self.pending - self.recorded - len(known)
        return np.concatenate([known, np.zeros(unknown, dtype=np.int32)]) if unknown else known

    def known_hashes(self) -> npt.NDArray[np.uint64] | None:
        """The prompt's hashes while they describe all tokens; None makes the cache compute them."""
        return None if self.outputs else self.hashes


def choice_seed(seed: int, index: int) -> int:
    """64-bit seed of choice `index`; choice 0 has the request's own."""
    return (seed + index * _GOLDEN) & 0xFFFFFFFFFFFFFFFF


def build_sequences(
    request: Request,
    namespace: Namespace,
    hashes: npt.NDArray[np.uint64],
    seed: int,
    orders: itertools.count[int],
    context_length: int = sys.maxsize,
) -> list[Sequence]:
    """All that is drawn for the request, one behind the other; only the first belongs in line.

    The other choices wait for the first one's prompt. The other beams are spare: the first steps of a beam
    search bring them to life. `context_length`: most tokens of prompt and answer together.
    """
    longest = min(request.sampling.max_tokens, context_length - len(request.tokens))
    seqs = [
        Sequence(request, index, namespace, hashes, choice_seed(seed, index), next(orders), longest=longest)
        for index in range(request.sampling.width)
    ]
    if not request.sampling.use_beam_search:
        seqs[0].forks = seqs[1:]
    return seqs
