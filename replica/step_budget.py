"""How many tokens a step may have: fewer for a while when the device has run out of memory."""

from __future__ import annotations

_GOOD_STEPS = 256
"""Steps without trouble after which the budget is doubled, up to what was configured."""


class StepBudget:
    """Between `least` and `most` tokens; begins at `most`."""

    def __init__(self, most: int, least: int) -> None:
        self.tokens = most
        self._most = most
        self._least = least
        self._good = 0

    def halve(self) -> bool:
        """A step was too large. False if steps are as small as they can be already."""
        before, self.tokens = self.tokens, max(self.tokens // 2, self._least)
        self._good = 0
        return self.tokens < before

    def passed(self) -> None:
        """A step was fine."""
        self._good = 0 if self.tokens == self._most else self._good + 1
        if self._good == _GOOD_STEPS:
            self.tokens, self._good = min(2 * self.tokens, self._most), 0
