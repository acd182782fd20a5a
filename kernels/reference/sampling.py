"""Drawing one token a row: what passes the filters, and which of it a uniform number picks."""

from __future__ import annotations

import torch
from torch import Tensor

# Probabilities that add up to exactly top_p must count as having reached it, however they were rounded.
ROUNDING = 1 - 1e-6
_M64 = 0xFFFFFFFFFFFFFFFF


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """int64[R], a token for each row of logits[R, V]; -1 where they hold a NaN or their highest is infinite.

    In this order: temperature (0: the highest logit, the lowest id among equals, and nothing below counts),
    top-k (0: all), top-p over what top-k left (1: all), min-p (0: all), then the first id whose cumulative
    weight among those left exceeds `uniform(seed, position)` times their total. Equal weights rank by id.
    All arguments but the logits are [R], integers or floats as their names say.
    """
    tokens = torch.full((len(logits),), -1, dtype=torch.int64)
    for i, row in enumerate(logits.double().cpu()):
        if row.isnan().any() or not row.max().isfinite():
            continue
        if float(temperature[i]) == 0:
            tokens[i] = int((row == row.max()).nonzero()[0, 0])
            continue
        weights = torch.exp((row - row.max()) / float(temperature[i]))
        ids = kept(weights, int(top_k[i]), float(top_p[i]), float(min_p[i]))
        cumulative = weights[ids].cumsum(0)
        target = uniform(int(seeds[i]), int(positions[i])) * cumulative[-1]
        tokens[i] = ids[torch.searchsorted(cumulative, target, right=True)]
    return tokens.to(logits.device)


def kept(weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """int64[c]: the ids, ascending, whose float64[V] weights pass the three filters."""
    order = weights.sort(descending=True, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    down = weights[order]
    if top_p < 1:
        before = down.cumsum(0) - down
        order = order[before < top_p * ROUNDING * down.sum()]
    if min_p > 0:
        order = order[weights[order] >= min_p * ROUNDING * down[0]]
    return (order if len(order) else order.new_tensor([int(weights.argmax())])).sort().values


def uniform(seed: int, position: int) -> float:
    """In [0, 1 - 2**-52]: 52 bits of a hash of seed and position (splitmix64's finalizer, twice)."""
    seeded = _mix(seed + 0x9E3779B97F4A7C15)
    return float(_mix(seeded + position * 0xD1342543DE82EF95) >> 12) * 2.0**-52


def _mix(x: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), modulo 2**64."""
    x &= _M64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _M64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _M64
    return x ^ (x >> 31)
