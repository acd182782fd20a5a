"""From logits to tokens, for a whole batch at once.

Order of the filters: penalties, forbidden tokens, temperature, top-k, top-p (over what top-k left), min-p; as
in Hugging Face transformers. Ties are broken by the lower token id, so nothing depends on the shape of the
batch.

Each draw inverts the cumulative distribution at one uniform number, a pure function of the choice's seed and
the position of the token. A draw therefore does not depend on batch neighbours, nor on preemption, nor on
whether the tokens before it were sampled here or came with the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replica.request import SamplingParams

_LOW32 = 0xFFFFFFFF
_U64 = np.uint64


@dataclass(frozen=True)
class Row:
    """One row of logits and what its draw depends on.

    Attributes:
        params: how to draw.
        seed: 64-bit seed of the choice.
        prompt: int32[n].
        outputs: tokens sampled so far; the draw is for position n + len(outputs).
        forbidden: token ids of the vocabulary that must not come now (end of text before min_tokens).
    """

    params: SamplingParams
    seed: int
    prompt: npt.NDArray[np.int32]
    outputs: Sequence[int] = ()
    forbidden: frozenset[int] = frozenset()

    @property
    def position(self) -> int:
        """Position in the sequence of the token to draw."""
        return len(self.prompt) + len(self.outputs)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the model's own distribution, before penalties, temperature and filters.

    Attributes:
        chosen: of the drawn token.
        top: (token id, log-probability), most likely first, as many as were asked for.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """Drawn tokens; -1 where the logits hold a NaN. `logprobs[i]` is None where none were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Tensor, rows: Sequence[Row]) -> Sampled:
    """Draw one token per row. logits: float[R, V], one row per entry of `rows`; left unchanged."""
    logits = logits.float()
    scores = _adjust(logits, rows)
    best, tokens = scores.max(dim=1)  # the maximum propagates NaN, the arg-maximum takes the lowest id
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [rows[i] for i in drawn])
    tokens[best.isnan()] = -1
    return Sampled(tokens.tolist(), _logprobs(logits, tokens, rows))


def uniform(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """float64[R] in [0, 1 - 2**-52], a hash of seed and position (splitmix64's finaliser, twice)."""
    with np.errstate(over="ignore"):
        seeded = _mix(np.asarray(seeds, dtype=_U64) + _U64(0x9E3779B97F4A7C15))
        mixed = _mix(seeded + np.asarray(positions, dtype=_U64) * _U64(0xD1342543DE82EF95))
    return (mixed >> _U64(12)).astype(np.float64) * 2.0**-52


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def _adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Penalties and forbidden tokens; copies only when there are any."""
    scores = logits
    for i, row in enumerate(rows):
        if not row.params.penalised and not row.forbidden:
            continue
        if scores is logits:
            scores = logits.clone()
        if row.params.penalised:
            _penalise(scores[i], row)
        if row.forbidden:
            scores[i, list(row.forbidden)] = -math.inf
    return scores


def _penalise(scores: Tensor, row: Row) -> None:
    params, outputs = row.params, np.asarray(row.outputs, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.union1d(row.prompt, outputs).astype(np.int64)).to(scores.device)
        values, penalty = scores[seen], params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(outputs) and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(outputs, return_counts=True)
        taken = torch.from_numpy(counts * params.frequency_penalty + params.presence_penalty)
        scores[torch.from_numpy(ids)] -= taken.to(scores)


def _draw(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    """int64[R] for rows that are not greedy."""
    params = [row.params for row in rows]
    temperature = _column(scores, [p.temperature for p in params])
    # Subtracting the maximum first keeps low temperatures from overflowing to inf - inf.
    probs = torch.softmax((scores - scores.max(dim=1, keepdim=True).values) / temperature, dim=1)
    u = torch.from_numpy(uniform([row.seed for row in rows], [row.position for row in rows]))
    u = u.to(scores.device)[:, None]
    filtered = [p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params]
    if not any(filtered):
        return _invert(probs, u)
    if all(filtered):
        return _draw_filtered(probs, u, params)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    for wanted, draw in ((True, True), (False, False)):
        at = [i for i, f in enumerate(filtered) if f == wanted]
        part, chosen = probs[at], [params[i] for i in at]
        tokens[at] = _draw_filtered(part, u[at], chosen) if draw else _invert(part, u[at])
    return tokens


def _draw_filtered(probs: Tensor, u: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Sort only the tokens that can pass the filters, mark which do, draw among them."""
    vocab = probs.shape[1]
    top_k = [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params]
    sizes = _candidates(probs, params, top_k)
    ids, values = _ranked(probs, int(sizes.max()))
    ranks = torch.arange(values.shape[1], device=probs.device)
    # A row must not see candidates that only a neighbour needs.
    kept = torch.where(ranks < sizes[:, None], values, 0.0).double()
    # A running sum does not change when zeros follow; sum() might, by its order of addition.
    upto = kept.cumsum(dim=1)
    total = torch.where(_column(kept, top_k) < vocab, upto[:, -1:], 1.0)
    before = upto - kept
    keep = before < _column(kept, [p.top_p for p in params]) * total
    keep &= kept >= _column(kept, [p.min_p for p in params]) * kept[:, :1]
    keep[:, 0] = True  # the most likely token always passes
    picked = _invert(torch.where(keep, kept, 0.0), u)
    return ids.gather(1, picked[:, None])[:, 0]


def _candidates(probs: Tensor, params: Sequence[SamplingParams], top_k: Sequence[int]) -> Tensor:
    """int64[R]: how many of each row's most likely tokens the filters can let pass (an upper bound).

    With top-p alone, tokens under (1 - top_p) / V weigh less than 1 - top_p together, so the nucleus is among
    the others; with min-p alone, the floor is the filter itself.
    """
    vocab = probs.shape[1]
    top_p = _column(probs, [p.top_p for p in params])
    min_p = _column(probs, [p.min_p for p in params])
    peak = probs.max(dim=1, keepdim=True).values
    floor = torch.where(top_p < 1, (1 - top_p) / vocab * 0.999, min_p * peak)
    above = (probs >= floor).sum(dim=1)
    limits = torch.tensor(top_k, device=probs.device)
    return torch.where(limits < vocab, limits, above).clamp(min=1)


def _ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids, values) [R, count], largest value first, ties by lower id, whatever `count` is.

    The bits of a float32 order like an integer once those of negative numbers are flipped, so that value and
    id pack into one unique 64-bit key.
    """
    bits = values.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = (ordered << 32) | (_LOW32 - torch.arange(values.shape[1], device=values.device))
    ids = _LOW32 - (keys.topk(count, dim=1).values & _LOW32)
    return ids, values.gather(1, ids)


def _invert(probs: Tensor, u: Tensor) -> Tensor:
    """int64[R]: the first index whose cumulative weight exceeds u times the total; never one of weight 0."""
    cumulative = probs.cumsum(dim=1, dtype=torch.float64)
    picked = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)[:, 0]
    return picked.clamp(max=probs.shape[1] - 1)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[Row]) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    at = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not at:
        return found
    logprobs = torch.log_softmax(logits[at], dim=1)
    chosen = logprobs.gather(1, tokens[at].clamp(min=0)[:, None])[:, 0].tolist()
    most = min(max(rows[i].params.logprobs or 0 for i in at), logits.shape[1])
    ids, values = (ranked.tolist() for ranked in _ranked(logprobs, most))
    for row, i in enumerate(at):
        count = rows[i].params.logprobs or 0
        found[i] = TokenLogprobs(chosen[row], tuple(zip(ids[row][:count], values[row][:count], strict=True)))
    return found
