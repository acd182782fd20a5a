"""More choices are drawn than are asked for, and the likeliest are the answer."""

from __future__ import annotations

from dataclasses import replace

from replica.answer import Answer
from replica.request import Output, Request, Usage
from replica.sampler import TokenLogprobs
from replica.sequence import Sequence


class BestOf:
    """The n choices with the highest mean log-probability, likeliest first; among equals the earlier drawn.

    Which they are is known when all have ended, so all text comes then; the start comes with the first token.
    Usage counts every token drawn. Log-probabilities are the model's own, before penalties, temperature and
    filters, and their mean is over all tokens of the choice, the one that ends it included.
    """

    def __init__(self, inner: Answer) -> None:
        self._inner = inner
        self._parts: list[list[Output]] = [[] for _ in inner.seqs]
        self._sums = [0.0] * len(inner.seqs)

    @property
    def request(self) -> Request:
        """What is answered."""
        return self._inner.request

    @property
    def seqs(self) -> list[Sequence]:
        """All choices that are drawn."""
        return self._inner.seqs

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return self._inner.done

    def take(
        self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, epoch: int, cache_seq: int
    ) -> list[Output]:
        """The start with the first token, everything else with the last."""
        assert logprobs is not None, "choices that are compared are drawn with log-probabilities"
        [part] = self._inner.take(seq, token, logprobs, epoch, cache_seq)
        self._sums[seq.index] += logprobs.chosen
        self._parts[seq.index].append(part)
        outputs = [] if part.start is None else [Output(self.request.id, start=part.start)]
        return outputs if part.usage is None else [*outputs, *self._best(part.usage)]

    def _best(self, usage: Usage) -> list[Output]:
        means = [total / len(parts) for total, parts in zip(self._sums, self._parts, strict=True)]
        ranking = sorted(range(len(means)), key=lambda index: -means[index])[: self.request.sampling.n]
        found = [_joined(rank, self._parts[index]) for rank, index in enumerate(ranking)]
        return [*found[:-1], replace(found[-1], usage=usage)]


def _joined(index: int, parts: list[Output]) -> Output:
    """All of a choice in one output, under another index."""
    last = parts[-1]
    logprobs = None if last.logprobs is None else tuple(e for part in parts for e in part.logprobs or ())
    return Output(
        last.request_id,
        index,
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.tokens),
        logprobs,
        last.finish_reason,
    )
