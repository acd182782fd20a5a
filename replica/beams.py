"""Beam search: not the likeliest next token, but the likeliest answers, several at once.

Plain Python over log-probabilities: no sequences, no blocks, no model. The rules are those of transformers'
`generate(num_beams=width)`, and give the same tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replica.request import SamplingParams
from replica.sampler import TokenLogprobs

Candidates = Sequence[tuple[int, float]]


def candidates_kept(params: SamplingParams, num_ending: int) -> int:
    """How many continuations a step looks at: enough that `width` of them go on if each beam can end in all
    `num_ending` ways (2 * width with a single end-of-text token)."""
    return max(2, 1 + num_ending) * params.width


@dataclass(frozen=True)
class Path:
    """An answer, or the beginning of one: its last token and what comes before.

    `logprob` is the model's of the token, `rivals` the most likely tokens there; `total` sums the
    log-probabilities of all `length` tokens.
    """

    before: Path | None
    token: int
    logprob: float
    rivals: Candidates
    total: float
    length: int

    def steps(self) -> list[Path]:
        """The path to each of its tokens, first one first."""
        found: list[Path] = []
        step: Path | None = self
        while step is not None:
            found.append(step)
            step = step.before
        return found[::-1]

    def tokens(self) -> list[int]:
        """All tokens."""
        return [step.token for step in self.steps()]

    def drawn(self) -> list[TokenLogprobs]:
        """Log-probabilities of all tokens."""
        return [TokenLogprobs(step.logprob, tuple(step.rivals)) for step in self.steps()]


class BeamSearch:
    """One search, from the prompt to `width` finished answers, best first.

    Each step looks at the likeliest continuations of all live beams (see `candidates_kept`). Those that end
    are finished answers if they are among the first `width`, with the score total / length**length_penalty,
    the ending token included in both; the best `width` are kept. Of the others the likeliest `width` live on.
    The longest answers end as if they had stopped.

    The search is over when nothing lives on, or when `width` answers are finished and `early_stopping` is
        True     nothing more;
        False    and the best beam's score, taken at its present length, does not beat the worst of them;
        "never"  the same, at the length that is best for it: with a positive length_penalty the longest.

    Ties go to the better beam, then to the lower token id.
    """

    def __init__(self, params: SamplingParams, keep: int, longest: int, ends: Callable[[Path], bool]) -> None:
        self.live: list[Path | None] = [None]  # the prompt alone
        self.finished: list[tuple[float, Path]] = []  # scores, best first
        self.drawn = 0  # tokens taken into live beams and finished answers
        self._params = params
        self._keep = keep
        self._longest = longest
        self._ends = ends

    def advance(self, candidates: Sequence[Candidates]) -> list[tuple[int, Path]]:
        """One step. candidates[i]: (token, log-probability) after live[i], best first.

        Returns the new live beams, best first, each with the index of the old one it continues; none when the
        search is over.
        """
        width, going = self._params.width, list[tuple[int, Path]]()
        for rank, (parent, path) in enumerate(self._best(candidates)):
            if self._ends(path):
                if rank < width:
                    self._finish(path)
            elif len(going) < width:
                going.append((parent, path))
        self.drawn += len(going)
        if self._over([path for _, path in going]):
            going = []
        self.live = [path for _, path in going]
        return going

    def _best(self, candidates: Sequence[Candidates]) -> list[tuple[int, Path]]:
        ranked = heapq.nsmallest(
            self._keep,
            (
                (-((0.0 if path is None else path.total) + logprob), parent, token, logprob)
                for parent, (path, found) in enumerate(zip(self.live, candidates, strict=True))
                for token, logprob in found[: self._keep]
                if logprob > -math.inf
            ),
        )
        return [
            (parent, self._longer(parent, token, logprob, -negative, candidates[parent]))
            for negative, parent, token, logprob in ranked
        ]

    def _longer(self, parent: int, token: int, logprob: float, total: float, rivals: Candidates) -> Path:
        before = self.live[parent]
        shown = rivals[: self._params.logprobs or 0]
        return Path(before, token, logprob, shown, total, 1 if before is None else before.length + 1)

    def _finish(self, path: Path) -> None:
        self.drawn += 1
        self.finished.append((self._score(path.total, path.length), path))
        self.finished.sort(key=lambda entry: -entry[0])
        del self.finished[self._params.width :]

    def _over(self, live: list[Path]) -> bool:
        if not live:
            return True
        if len(self.finished) < self._params.width:
            return False
        if self._params.early_stopping is True:
            return True
        never = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._longest if never else live[0].length
        return self._score(live[0].total, length) <= self.finished[-1][0]

    def _score(self, total: float, length: int) -> float:
        return total / float(length) ** self._params.length_penalty
