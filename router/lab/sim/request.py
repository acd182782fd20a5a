"""One request on its way through a simulated fleet."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.hashing import PrefixHasher
from kvcore.lease import Lease
from kvcore.namespace import Namespace
from router.lab.record import Request
from router.placement import Decision

SPACE = Namespace("simulated")
HASHER = PrefixHasher(b"simulation")

_ROOT = HASHER.root(SPACE)


@dataclass(eq=False)
class SimRequest:
    """A prompt with its answer's length, and what happened to it so far; times in simulated seconds."""

    tokens: npt.NDArray[np.int32]
    hashes: npt.NDArray[np.uint64]
    answer_tokens: int
    arrived_at: float
    session: str | None = None
    placed: object = None  # what the policy wants to be told again
    decision: Decision | None = None  # of policies that say what they believed, and why they chose
    replica: int = -1
    lease: Lease | None = None
    hit: int = 0  # tokens that were cached when somebody last looked, while it waits
    work: float = 0.0  # of what is left by then, while it waits: see `Line`
    computed: int = 0
    produced: int = 0
    cached_tokens: int = -1  # at the first claim, as what follows
    loaded_tokens: int = 0  # part of them that came from lower tiers
    first_at: float = -1.0

    @classmethod
    def of(cls, request: Request, block_size: int, now: float) -> "SimRequest":
        """A request of a trace that arrives now. Hash ids are taken as they are, a token for each."""
        blocks = request.blocks
        if blocks is None:
            tokens = request.tokens()
            hashes = HASHER.block_hashes(tokens, block_size, _ROOT)
        else:
            ids = blocks.ids
            tokens = blocks.stand_ins(ids)
            if blocks.size == block_size:
                hashes = blocks.keys(ids)[: len(tokens) // block_size]
            else:
                hashes = HASHER.block_hashes(tokens, block_size, _ROOT)
        return cls(tokens, hashes, request.max_tokens or 1, now, request.session_id)

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed before the next one comes: the prompt and what was produced."""
        return len(self.tokens) + self.produced

    def left(self) -> int:
        """Tokens to be computed before the next one comes, less what is computed or looked like a hit."""
        return len(self.tokens) + self.produced - (self.hit if self.lease is None else self.computed)

    def forget_progress(self) -> None:
        """Its blocks are gone, or its replica: it is to be computed again, the produced tokens too."""
        self.lease, self.computed, self.hit = None, 0, 0
