"""What one step computes, and who draws from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvcore.lease import BlockCopy
from replica.sequence import Sequence


def work(start: int, count: int, attention_tokens: int) -> float:
    """What computing `count` tokens after `start` costs, in tokens without a context: attention makes each of
    them cost 1 + context / attention_tokens."""
    return count * (1.0 + (start + count / 2) / attention_tokens)


@dataclass(frozen=True)
class Chunk:
    """Tokens start ... start + count - 1 of one sequence, to be computed in this step.

    The last `len(drafts)` of them are guesses at what will be drawn: they are in the lease and not in the
    sequence.

    Attributes:
        samples: the chunk reaches the sequence's end, so that its next token can be drawn.
        carried: its one token is drawn by the step before, which is still running.
    """

    seq: Sequence
    start: int
    count: int
    samples: bool
    carried: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The first token after it, drafts included."""
        return self.start + self.count

    @property
    def drawers(self) -> list[Sequence]:
        """Who draws from the chunk's end: the sequence, and the choices that wait for its prompt."""
        return [self.seq, *self.seq.forks] if self.samples else []


@dataclass
class Plan:
    """One step.

    Attributes:
        chunks: at most one per sequence, decodes first.
        copies: (source block, destination block, tokens) to copy before anything is computed.
        prefill_tokens: tokens of chunks of more than one token, drafts aside.
        decodes: chunks of one token, drafts aside.
        drafted: draft tokens.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    prefill_tokens: int = 0
    decodes: int = 0
    drafted: int = 0

    def add(self, seq: Sequence, count: int) -> None:
        """Compute the next `count` tokens of `seq`."""
        end = seq.num_tokens + seq.pending
        samples = seq.planned + count == end
        self.chunks.append(Chunk(seq, seq.planned, count, samples, samples and seq.pending > 0))
        if count == 1:
            self.decodes += 1
        else:
            self.prefill_tokens += count

    def prefill_work(self, attention_tokens: int) -> float:
        """`prefill_tokens`, each counted 1 + context / attention_tokens times."""
        return sum(
            work(chunk.start, chunk.count, attention_tokens)
            for chunk in self.chunks
            if chunk.count > 1 and not chunk.drafts
        )

    def draft(self, place: int, drafts: tuple[int, ...]) -> None:
        """Let the decode `chunks[place]` compute these guesses too."""
        chunk = self.chunks[place]
        self.chunks[place] = replace(chunk, count=chunk.count + len(drafts), drafts=drafts)
        self.drafted += len(drafts)

    def copy(self, copy: BlockCopy | None) -> None:
        """Take note of the copy a lease asks for, if any."""
        if copy is not None:
            self.copies.append((copy.src, copy.dst, copy.num_tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.prefill_tokens + self.decodes + self.drafted
