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

Floats = npt.NDArray[np.float32]

_GROUP = 256
_ROUNDING = 1 - 1e-6  # float32 probabilities that add up to exactly top_p must count as having reached it
_U64 = np.uint64


@dataclass(frozen=True)
class Row:
    """One row of logits and what its draw depends on.

    Attributes:
        params: how to draw.
        seed: 64-bit seed of the choice.
        prompt: int32[n].
        outputs: tokens sampled so far; the draw is for position n + len(outputs) + ahead.
        forbidden: token ids of the vocabulary that must not come now (end of text before min_tokens).
        candidates: draw nothing, but tell this many of the most likely tokens that may come (for a beam).
        ahead: tokens sampled after `outputs` that are not known yet; only for rows that are `plain`.
    """

    params: SamplingParams
    seed: int
    prompt: npt.NDArray[np.int32]
    outputs: Sequence[int] = ()
    forbidden: frozenset[int] = frozenset()
    candidates: int = 0
    ahead: int = 0

    @property
    def plain(self) -> bool:
        """Whether the draw depends on nothing but logits, parameters, seed and position, and no more than the
        token is asked for."""
        return not self.params.penalised and not self.forbidden and self.reported is None

    @property
    def greedy(self) -> bool:
        """Whether there is nothing to draw."""
        return self.params.greedy or self.candidates > 0

    @property
    def reported(self) -> int | None:
        """How many of the most likely tokens to tell; None for no log-probabilities at all."""
        if self.candidates:
            return self.candidates
        return 0 if self.params.ranked and self.params.logprobs is None else self.params.logprobs

    @property
    def position(self) -> int:
        """Position in the sequence of the token to draw."""
        return len(self.prompt) + len(self.outputs) + self.ahead


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
    """Drawn tokens; -1 where the logits hold a NaN or their highest is infinite.

    `logprobs[i]` is None where none were asked for.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Tensor, rows: Sequence[Row]) -> Sampled:
    """Draw one token per row. logits: float[R, V], one row per entry of `rows`; left unchanged."""
    logits = logits.float()
    scores = _adjust(logits, rows)
    tokens = _greedy(scores)
    sound = scores.gather(1, tokens[:, None])[:, 0].isfinite()
    drawn = [i for i, fine in enumerate(sound.tolist()) if fine and not rows[i].greedy]
    if len(drawn) == len(rows):
        tokens = _draw(scores, rows)
    elif drawn:
        tokens[drawn] = _draw(scores[drawn], [rows[i] for i in drawn])
    tokens[~sound] = -1
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


def _greedy(scores: Tensor) -> Tensor:
    """int64[R]: the highest score, the lowest id among equals; where there is a NaN, that."""
    if scores.device.type == "cpu":
        # 20 times as fast as torch's arg-maximum over a vocabulary of 49,152.
        return torch.from_numpy(scores.numpy().argmax(axis=1))
    return scores.argmax(dim=1)


def _draw(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    """int64[R] for rows that are not greedy."""
    temperature = torch.tensor([row.params.temperature for row in rows], device=scores.device)[:, None]
    # Subtracting the maximum first keeps low temperatures from overflowing to inf - inf.
    probs = torch.softmax((scores - scores.amax(dim=1, keepdim=True)) / temperature, dim=1)
    u = uniform([row.seed for row in rows], [row.position for row in rows])
    filtered = [row.params.filtered for row in rows]
    if not any(filtered):
        return _invert(probs, torch.from_numpy(u).to(probs.device))
    tokens = torch.empty(len(rows), dtype=torch.int64)
    plain = [i for i, f in enumerate(filtered) if not f]
    if plain:
        tokens[plain] = _invert(probs[plain], torch.from_numpy(u[plain]).to(probs.device)).cpu()
    narrow = [i for i, f in enumerate(filtered) if f]
    for i, weights in zip(narrow, probs[narrow].cpu().numpy(), strict=True):
        tokens[i] = _draw_filtered(weights, rows[i].params, u[i])
    return tokens.to(scores.device)


def _invert(probs: Tensor, u: Tensor) -> Tensor:
    """int64[R]: the first id whose cumulative weight exceeds u times the total; never one of weight 0.

    First the group of 256 ids, then the id in it, which spares a running sum over the whole vocabulary.
    """
    probs = torch.nn.functional.pad(probs, (0, -probs.shape[1] % _GROUP)).view(len(probs), -1, _GROUP)
    groups = probs.sum(dim=2).double().cumsum(dim=1)
    target = u[:, None] * groups[:, -1:]
    group = torch.searchsorted(groups, target, right=True)
    rest = target - torch.where(group > 0, groups.gather(1, (group - 1).clamp(min=0)), 0.0)
    inside = probs[torch.arange(len(probs), device=probs.device), group[:, 0]].double().cumsum(dim=1)
    # The group's own sum may be rounded differently: stay below what its members add up to.
    rest = torch.minimum(rest, inside[:, -1:] * (1 - 2.0**-52))
    return (group * _GROUP + torch.searchsorted(inside, rest, right=True))[:, 0]


def _draw_filtered(weights: Floats, params: SamplingParams, u: float) -> int:
    """One id out of float32[V], among those that pass top-k, top-p and min-p."""
    ids = np.flatnonzero(weights >= _floor(weights, params))
    weights = weights[ids]
    kept = _kept(weights, params, len(ids))
    ids, weights = ids[kept], weights[kept]
    cumulative = weights.cumsum(dtype=np.float64)
    return int(ids[np.searchsorted(cumulative, u * cumulative[-1], side="right")])


def _floor(weights: Floats, params: SamplingParams) -> float:
    """A weight that everything that passes the filters has at least; cheap, to have less to sort.

    Ids under (1 - top_p) / V weigh less than 1 - top_p together, so the nucleus is among the others.
    """
    vocab = len(weights)
    if 0 < params.top_k < vocab:
        return float(np.partition(weights, vocab - params.top_k)[vocab - params.top_k])
    if params.top_p < 1:
        return (1 - params.top_p) / vocab * _ROUNDING
    return params.min_p * float(weights.max()) * _ROUNDING


def _kept(weights: Floats, params: SamplingParams, count: int) -> npt.NDArray[np.intp]:
    """Places in float32[c], ascending, of what passes: the first so many by weight, ties by place."""
    down = np.sort(weights)[::-1]
    total = 1.0
    if 0 < params.top_k < count:
        count = params.top_k
    if params.top_k > 0:
        total = float(down[:count].sum(dtype=np.float64))
    if params.top_p < 1:
        before = down[: count - 1].cumsum(dtype=np.float64)
        count = 1 + int(np.searchsorted(before, params.top_p * total * _ROUNDING))
    if params.min_p > 0:
        count = max(1, int((down[:count] >= params.min_p * _ROUNDING * down[0]).sum()))
    last = down[count - 1]
    above = np.flatnonzero(weights > last)
    return np.sort(np.concatenate([above, np.flatnonzero(weights == last)[: count - len(above)]]))


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[Row]) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    at = [i for i, row in enumerate(rows) if row.reported is not None]
    if not at:
        return found
    logprobs = torch.log_softmax(logits[at], dim=1)
    chosen = logprobs.gather(1, tokens[at].clamp(min=0)[:, None])[:, 0].tolist()
    for values, own, i in zip(logprobs, chosen, at, strict=True):
        row = rows[i]
        if row.candidates and row.forbidden:
            values[list(row.forbidden)] = -math.inf
        found[i] = TokenLogprobs(own, _top(values, row.reported or 0))
    return found


def _top(values: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` highest of float[V] with their ids, ties by lower id."""
    if count == 0:
        return ()
    last = values.topk(min(count, len(values))).values[-1]
    ids = (values >= last).nonzero()[:, 0]
    order = values[ids].sort(descending=True, stable=True).indices[:count]
    return tuple(zip(ids[order].tolist(), values[ids[order]].tolist(), strict=True))
