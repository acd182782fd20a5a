"""Whether a replica's fingerprint promises more than the replica holds, from predicted and reported hits.

One request proves little, for blocks may be evicted between the decision and the claim. A replica becomes
suspect when promises keep failing: every failed one counts up, every kept one down.
"""

THRESHOLD = 4
"""Net failed promises that make a replica suspect."""


class Suspicion:
    """What one replica's promises were worth since its last snapshot."""

    __slots__ = ("_failed", "suspect")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A snapshot was applied: begin anew."""
        self._failed = 0
        self.suspect = False

    def observe(self, predicted_tokens: int, cached_tokens: int, tolerance_tokens: int) -> bool:
        """Note one request. Returns True when the replica becomes suspect by it.

        A promise is failed when the hit falls short by more than `tolerance_tokens` and a tenth of it.
        Requests without a predicted hit promise nothing.
        """
        if predicted_tokens <= 0:
            return False
        short = predicted_tokens - cached_tokens
        if short > tolerance_tokens and 10 * short > predicted_tokens:
            self._failed += 1
        elif self._failed:
            self._failed -= 1
        became = self._failed >= THRESHOLD and not self.suspect
        self.suspect = self.suspect or became
        return became
