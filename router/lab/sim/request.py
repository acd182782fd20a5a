"""One request on its way through a simulated fleet."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcore.lease import Lease
from router.placement import Decision


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
    computed: int = 0
    produced: int = 0
    cached_tokens: int = -1  # at the first claim
    first_at: float = field(default=-1.0)

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed before the next one comes: the prompt and what was produced."""
        return len(self.tokens) + self.produced
