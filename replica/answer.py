"""From drawn tokens to what the caller reads: text, reasons to stop, log-probabilities, usage."""

from __future__ import annotations

from typing import Any, Protocol

from replica.detokenizer import Detokenizer
from replica.request import Output, Request, Start, Usage
from replica.sampler import TokenLogprobs
from replica.sequence import Sequence


class EngineTokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    eos_ids: frozenset[int]

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes a token stands for; special tokens as their own text."""

    def is_special(self, token_id: int, /) -> bool:
        """Whether it is a control token, which is left out of text."""


class Answer:
    """The growing answer to one request, all its choices.

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
        self._context_length = context_length
        self._texts = [Detokenizer(self._visible_bytes, request.sampling.stop) for _ in seqs]
        self._unfinished = len(seqs)
        self._sampled = 0

    def take(
        self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, epoch: int, cache_seq: int
    ) -> Output:
        """Add one token to a choice. epoch, cache_seq: of the cache, after the token's KV was committed."""
        first = self._sampled == 0
        seq.outputs.append(token)
        self._sampled += 1
        text, reason = self._text(seq, token)
        if reason is not None:
            text += self._texts[seq.index].flush()
            self._unfinished -= 1
        cached = self.seqs[0].cached_tokens or 0
        return Output(
            self.request.id,
            seq.index,
            text,
            (token,),
            None if logprobs is None else (self._entry(token, logprobs),),
            reason,
            Start(seq.num_prompt, cached, epoch, cache_seq) if first else None,
            None if self._unfinished else Usage(seq.num_prompt, self._sampled, cached),
        )

    def _text(self, seq: Sequence, token: int) -> tuple[str, str | None]:
        """New text, and why the choice ends here or None."""
        params, count, text_of = seq.sampling, len(seq.outputs), self._texts[seq.index]
        if self._ends(seq, token):
            return "", "stop"
        text = text_of.push(token, count >= params.min_tokens)
        if text_of.stopped:
            return text, "stop"
        if count >= params.max_tokens or seq.num_tokens >= self._context_length:
            return text, "length"
        return text, None

    def _ends(self, seq: Sequence, token: int) -> bool:
        """Whether the token ends the choice. Before min_tokens the sampler never draws one that does."""
        params = seq.sampling
        return token in params.stop_token_ids or (not params.ignore_eos and token in self._tokenizer.eos_ids)

    def _visible_bytes(self, token: int) -> bytes:
        return b"" if self._tokenizer.is_special(token) else self._tokenizer.token_bytes(token)

    def _entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(other, value) for other, value in logprobs.top]
        return {**self._token(token, logprobs.chosen), "top": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.token_bytes(token)
        text = piece.decode("utf-8", "replace")
        return {"token": text, "bytes": list(piece), "logprob": logprob, "id": token}
