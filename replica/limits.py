"""What an engine can serve at all, whatever else it is doing."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from replica.config import EngineConfig
from replica.errors import InvalidRequest
from replica.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Of one engine.

    Attributes:
        context_length: most tokens of a prompt and its answer together.
        vocab_size: of the model.
        max_queue: choices that may wait.
    """

    context_length: int
    vocab_size: int
    max_queue: int

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` for what can never be served."""
        tokens, sampling = request.tokens, request.sampling
        if len(tokens) == 0:
            raise InvalidRequest("the prompt is empty")
        if len(tokens) >= self.context_length:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens; prompt and answer together must not exceed "
                f"{self.context_length}"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise InvalidRequest(f"the prompt has token ids outside 0 ... {self.vocab_size - 1}")
        if sampling.width > self.max_queue:
            raise InvalidRequest(f"n is {sampling.width}; at most {self.max_queue} choices can wait")
        if request.adapter is not None:
            raise InvalidRequest(f"adapter {request.adapter!r} is not loaded")
        if sampling.use_beam_search and 2 * sampling.width > self.vocab_size:
            raise InvalidRequest(f"more than {self.vocab_size // 2} beams are too many for this vocabulary")


def longest_context(config: EngineConfig, model_context: int, num_blocks: int) -> int:
    """Longest prompt plus answer: what the model, the settings and the pool allow."""
    limit = min(model_context, config.max_model_len or model_context)
    pool = num_blocks * config.block_size
    if pool < limit:
        logger.warning("context cut from %d to %d tokens, which is all the KV pool holds", limit, pool)
    return min(limit, pool)
