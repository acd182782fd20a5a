"""The answer of a beam search: live beams are sequences of the engine, which fork and are let go of."""

from __future__ import annotations

from typing import Protocol

from replica.beams import BeamSearch, Candidates, Path, candidates_kept
from replica.choice import Choice, EngineTokenizer, logprob_entry
from replica.request import Output, Request, Start, Usage
from replica.sampler import TokenLogprobs
from replica.sequence import Sequence


class Forking(Protocol):
    """What a beam search needs of the scheduler."""

    def fork(self, parent: Sequence, child: Sequence, /) -> None:
        """Let `child` go on where `parent` is computed."""

    def resume(self, seq: Sequence, /) -> None:
        """There is something to compute again for a parked sequence."""

    def remove(self, seq: Sequence, /) -> None:
        """Let go of a sequence's blocks and its place."""


class BeamAnswer:
    """Gathers the candidates of each live beam, however those are scheduled, and then takes the next step.

    A beam that has its candidates is parked until the others have theirs. Everything is told at the end,
    apart from the start. Usage counts every token that a beam or a finished answer took on.
    """

    def __init__(
        self,
        request: Request,
        seqs: list[Sequence],
        tokenizer: EngineTokenizer,
        context_length: int,
        scheduler: Forking,
    ) -> None:
        params = request.sampling
        self.request = request
        self.seqs = seqs
        self.done = False
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._longest = min(params.max_tokens, context_length - len(request.tokens))
        self._ending = params.ending_ids(tokenizer.eos_ids)
        keep = candidates_kept(params, len(self._ending))
        self._search = BeamSearch(params, keep, self._longest, self._ends)
        self._live, self._spare = seqs[:1], seqs[1:]
        self._candidates: dict[Sequence, Candidates] = {}
        self._started = False

    def take(
        self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, epoch: int, cache_seq: int
    ) -> list[Output]:
        """Take the candidates for the next token of `seq`; `token` was not drawn and means nothing."""
        assert logprobs is not None, "beams are drawn with their candidates"
        cached, outputs = self.seqs[0].cached_tokens or 0, list[Output]()
        if not self._started:
            self._started = True
            outputs.append(Output(self.request.id, start=Start(seq.num_prompt, cached, epoch, cache_seq)))
        self._candidates[seq] = logprobs.top
        seq.parked = True
        if len(self._candidates) == len(self._live):
            self._advance()
        if self.done:
            outputs += self._results(Usage(seq.num_prompt, self._search.drawn, cached))
        return outputs

    def _advance(self) -> None:
        parents = self._live
        going = self._search.advance([self._candidates[seq] for seq in parents])
        self._candidates.clear()
        heirs = {parent for parent, _ in going}
        for index, seq in enumerate(parents):
            if index not in heirs:
                self._scheduler.remove(seq)
                self._spare.append(seq)
        self._spare.sort(key=lambda seq: seq.order)
        self._live = [self._heir(parents[parent], path) for parent, path in going]
        self.done = not going

    def _heir(self, parent: Sequence, path: Path) -> Sequence:
        """The parent itself for its best continuation, forks for the others."""
        if parent.parked:
            parent.outputs.append(path.token)
            self._scheduler.resume(parent)
            return parent
        child = self._spare.pop(0)
        child.outputs, child.parked = path.tokens(), False
        self._scheduler.fork(parent, child)
        return child

    def _ends(self, path: Path) -> bool:
        if path.token in self._ending or path.length >= self._longest:
            return True
        return bool(self.request.sampling.stop) and self._read(path)[1] is not None

    def _read(self, path: Path) -> tuple[str, str | None]:
        return Choice(self.request.sampling, self._tokenizer, self._longest).push_all(path.tokens())

    def _results(self, usage: Usage) -> list[Output]:
        best = [path for _, path in self._search.finished[: self.request.sampling.n]]
        last = len(best) - 1
        return [
            self._result(index, path, usage if index == last else None) for index, path in enumerate(best)
        ]

    def _result(self, index: int, path: Path, usage: Usage | None) -> Output:
        tokens, top = tuple(path.tokens()), self.request.sampling.logprobs
        text, reason = self._read(path)
        entries = None
        if top is not None:
            pairs = zip(tokens, path.drawn(), strict=True)
            entries = tuple(logprob_entry(self._tokenizer, token, drawn, top) for token, drawn in pairs)
        return Output(self.request.id, index, text, tokens, entries, reason, None, usage)
