"""How fast this engine is, learnt from its own steps: what a router needs to predict waiting times."""

from __future__ import annotations

PRIOR_TOKENS_PER_S = 1000.0
PRIOR_STEP_S = 0.03
_PRIOR_TOKENS = 16.0
_HALF_LIFE_TOKENS = 4096.0
_STEP_WEIGHT = 0.1


class Rates:
    """Moving averages of prefill speed and decode step time.

    Tokens are counted as `replica.plan.work` does, so that the rate is the same at every context. Prefill
    speed is decayed tokens over decayed seconds, so a prompt that is nearly all cached, which pays a
    step's fixed cost for a handful of tokens, hardly counts. Before the first real step modest guesses stand
    in.
    """

    def __init__(self) -> None:
        self._tokens = _PRIOR_TOKENS
        self._seconds = _PRIOR_TOKENS / PRIOR_TOKENS_PER_S
        self._step_s: float | None = None
        self.measured_tokens = 0  # prompt tokens that the rate has been learnt from

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second of prefill, less what attention to a context costs."""
        return self._tokens / self._seconds

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step that only decodes, at the batch sizes of late."""
        return PRIOR_STEP_S if self._step_s is None else self._step_s

    def record(self, prefill: float, decodes: int, seconds: float) -> None:
        """Take note of one step, with its `Plan.prefill_work`. In a mixed one, a usual decode step's time is
        taken off the prefill's."""
        if prefill == 0:
            if decodes:
                before = seconds if self._step_s is None else self._step_s
                self._step_s = before + _STEP_WEIGHT * (seconds - before)
            return
        share = prefill / (prefill + decodes)
        spent = max(seconds - (self.decode_step_s if decodes else 0.0), seconds * share * 0.5, 1e-9)
        decay = 0.5 ** (prefill / _HALF_LIFE_TOKENS)
        self.measured_tokens += round(prefill)
        self._tokens = self._tokens * decay + prefill
        self._seconds = self._seconds * decay + spent
