"""One token a row, drawn in one launch: no sort, and nothing but the token leaves the GPU.

The order is that of `kernels.reference.sample`, which is that of the replica's own sampler (penalties and
forbidden tokens come before both): temperature, top-k, top-p over what top-k left, min-p, then the first id
whose cumulative weight exceeds a uniform number's share of the total; equal weights rank by id. The uniform
number is a hash of (seed, position), so a draw does not depend on the rest of the batch.

Whatever passes top-k and top-p is a beginning of the ids in order of weight: all above some weight, and the
first few that have just it. That weight is found bit by bit: non-negative floats compare like the integers of
their bits. Each pass over the row settles two bits, 15 passes settle all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
ROUNDING = tl.constexpr(1 - 1e-6)  # as in the reference


@triton.jit
def _weights(logits, ids, vocab, best, temperature):
    """float32[TILE] in 0 ... 1: the highest logit weighs 1, what lies past the vocabulary nothing."""
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return tl.exp((x - best) / temperature)


@triton.jit
def _reaching(logits, vocab, best, temperature, bound, BY_COUNT: tl.constexpr, TILE: tl.constexpr):
    """int32: bits of the highest weight such that those from there on reach `bound` in number or in sum."""
    found = 0
    for step in range(15):
        unit = 1 << (28 - 2 * step)
        one = tl.zeros([TILE], tl.float32)
        two = tl.zeros([TILE], tl.float32)
        three = tl.zeros([TILE], tl.float32)
        for first in range(0, vocab, TILE):
            weights = _weights(logits, first + tl.arange(0, TILE), vocab, best, temperature)
            bits = weights.to(tl.int32, bitcast=True)
            values = tl.where(bits > 0, 1.0, 0.0) if BY_COUNT else weights
            one += tl.where(bits >= found + unit, values, 0.0)
            two += tl.where(bits >= found + 2 * unit, values, 0.0)
            three += tl.where(bits >= found + 3 * unit, values, 0.0)
        reached = (tl.sum(one.to(tl.float64), 0) >= bound).to(tl.int32)
        reached += (tl.sum(two.to(tl.float64), 0) >= bound).to(tl.int32)
        reached += (tl.sum(three.to(tl.float64), 0) >= bound).to(tl.int32)
        found += reached * unit
    return found


@triton.jit
def _above(logits, vocab, best, temperature, edge, TILE: tl.constexpr):
    """Number and float64 sum of the weights whose bits exceed `edge`."""
    number = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab, TILE):
        weights = _weights(logits, first + tl.arange(0, TILE), vocab, best, temperature)
        above = weights.to(tl.int32, bitcast=True) > edge
        number += above.to(tl.int32)
        total += tl.where(above, weights, 0.0)
    return tl.sum(number, 0), tl.sum(total.to(tl.float64), 0)


@triton.jit
def _passing(logits, ids, vocab, best, temperature, edge, ties, seen, least):
    """Weights of a tile, 0 for what the filters drop; and how many weights at the edge there were so far."""
    weights = _weights(logits, ids, vocab, best, temperature)
    bits = weights.to(tl.int32, bitcast=True)
    tied = (bits == edge) & (ids < vocab)
    rank = seen + tl.cumsum(tied.to(tl.int32), 0)
    keep = ((bits > edge) | (tied & (rank <= ties))) & (weights >= least)
    return tl.where(keep, weights, 0.0), seen + tl.sum(tied.to(tl.int32), 0)


@triton.jit
def _mix(x):
    """The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """float64 in [0, 1) with 52 random bits, those of `replica.sampler.uniform`."""
    seeded = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    mixed = _mix(seeded + position.to(tl.uint64, bitcast=True) * 0xD1342543DE82EF95)
    # Less than 2**52, so that a signed conversion does.
    return (mixed >> 12).to(tl.int64, bitcast=True).to(tl.float64) * (2.0**-52)


@triton.jit
def _drawn(logits, vocab, best, temperature, top_k, top_p, min_p, share, TILE: tl.constexpr):
    """The id drawn by a uniform number `share`; the highest logit `best` is finite, none is NaN."""
    edge, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + vocab
    if (top_k > 0) & (top_k < vocab):
        edge = _reaching(logits, vocab, best, temperature, top_k, True, TILE)
        number, _ = _above(logits, vocab, best, temperature, edge, TILE)
        ties = top_k - number
    if top_p < 1:
        _, total = _above(logits, vocab, best, temperature, edge, TILE)
        total += edge.to(tl.float32, bitcast=True).to(tl.float64) * ties
        # At least something must be reached, even with a top_p of 0.
        bound = tl.maximum(top_p.to(tl.float64) * ROUNDING * total, 1e-300)
        # However sums are rounded, the nucleus is within what top-k left.
        nucleus = tl.maximum(_reaching(logits, vocab, best, temperature, bound, False, TILE), edge)
        _, before = _above(logits, vocab, best, temperature, nucleus, TILE)
        each = nucleus.to(tl.float32, bitcast=True).to(tl.float64)
        needed = tl.maximum(tl.ceil((bound - before) / each), 1).to(tl.int32)
        ties = tl.where(nucleus == edge, tl.minimum(ties, needed), needed)
        edge = nucleus
    least = (min_p * ROUNDING).to(tl.float32)
    seen, total = 0, tl.full([], 0, tl.float64)
    for first in range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        weights, seen = _passing(logits, ids, vocab, best, temperature, edge, ties, seen, least)
        total += tl.sum(weights.to(tl.float64), 0)
    target = share * total
    seen, token, before = 0, tl.full([], -1, tl.int32), tl.full([], 0, tl.float64)
    for first in range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        weights, seen = _passing(logits, ids, vocab, best, temperature, edge, ties, seen, least)
        wide = weights.to(tl.float64)
        inside = tl.sum(wide, 0)
        if (before <= target) & (inside > 0):
            # The last of the tile stands in where its running sum is rounded to less than its sum.
            last = tl.max(tl.where(weights > 0, ids, -1), 0)
            reached = (before + tl.cumsum(wide, 0) > target) & (weights > 0)
            token = tl.minimum(tl.min(tl.where(reached, ids, vocab), 0), last)
        before += inside
    return token


@triton.jit
def sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens, stride, vocab, TILE: tl.constexpr
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    best, token, bad = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32), 0
    for first in range(0, vocab, TILE):
        ids = first + tl.arange(0, TILE)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        bad += tl.sum((x != x).to(tl.int32), 0)
        top = tl.max(x, 0)
        at = tl.min(tl.where(x == top, ids, vocab), 0)
        token = tl.where(top > best, at, token)
        best = tl.maximum(best, top)
    temperature = tl.load(temperatures + row)
    if (bad > 0) | (best == float("inf")) | (best == float("-inf")):
        token = tl.full([], -1, tl.int32)
    elif temperature > 0:
        share = _uniform(tl.load(seeds + row), tl.load(positions + row))
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        token = _drawn(logits, vocab, best, temperature, top_k, top_p, min_p, share, TILE)
    tl.store(tokens + row, token.to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """int64[R] from logits[R, V], as `kernels.reference.sample`; all on one device.

    temperature, top_p, min_p are float32[R]; top_k int32[R]; seeds (their bits) and positions int64[R].
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        sample_kernel[(len(logits),)](
            logits, temperature, top_k, top_p, min_p, seeds, positions, tokens,
            logits.stride(0), logits.shape[1], TILE=TILE, num_warps=16,
        )  # fmt: skip
    return tokens
