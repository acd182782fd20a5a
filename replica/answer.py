"""From drawn tokens to what the caller reads, as the tokens come: text, reasons to stop, usage."""

from __future__ import annotations

from typing import Protocol

from replica.choice import Choice, EngineTokenizer, logprob_entry
from replica.request import Output, Request, Start, Usage
from replica.sampler import TokenLogprobs
from replica.sequence import Sequence


class Answer(Protocol):
    """The growing answer to one request.

    Attributes:
        request: what is answered.
        seqs: all that is drawn for it.
        done: nothing more is to be drawn.
    """

    @property
    def request(self) -> Request:
        """See above."""

    @property
    def seqs(self) -> list[Sequence]:
        """See above."""

    @property
    def done(self) -> bool:
        """See above."""

    def take(
        self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, epoch: int, cache_seq: int
    ) -> list[Output]:
        """Take one token drawn for `seq`, and tell in `seq.finish_reason` when it needs no more.

        epoch, cache_seq: of the cache, after the prompt's KV was committed.
        """


class Streamed:
    """Every choice is told token by token.

    Args:
        request: what is answered.
        seqs: its choices, by index.
        tokenizer: of the model.
        context_length: prompt and answer together never exceed it.
    """

    def __init__(
        self, request: Request, seqs: list[Sequence], tokenizer: EngineTokenizer, context_length: int
    ) -> None:
        self.request = request
        self.seqs = seqs
        self._tokenizer = tokenizer
        longest = context_length - len(request.tokens)
        self._choices = [Choice(request.sampling, tokenizer, longest) for _ in seqs]
        self._unfinished = len(seqs)
        self._sampled = 0

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return self._unfinished == 0

    def take(
        self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, epoch: int, cache_seq: int
    ) -> list[Output]:
        """One output, with the token."""
        first = self._sampled == 0
        seq.outputs.append(token)
        self._sampled += 1
        text, seq.finish_reason = self._choices[seq.index].push(token)
        self._unfinished -= seq.finish_reason is not None
        cached = self.seqs[0].cached_tokens or 0
        top = self.request.sampling.logprobs
        output = Output(
            self.request.id,
            seq.index,
            text,
            (token,),
            None
            if logprobs is None or top is None
            else (logprob_entry(self._tokenizer, token, logprobs, top),),
            seq.finish_reason,
            Start(seq.num_prompt, cached, epoch, cache_seq) if first else None,
            Usage(seq.num_prompt, self._sampled, cached) if self.done else None,
        )
        return [output]
