"""Weights quantized in groups along the input: what most GGUF formats are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP = 32


@dataclass(frozen=True)
class GroupedWeight:
    """weight[n, k] = codes[n, k] * scale[n, k // 32] + offset[n, k // 32], in float32.

    Attributes:
        codes: uint8[out, in]; in is a multiple of 32.
        scale: float32[out, in // 32].
        offset: float32[out, in // 32].
        bits: 4 when every code is below 16, else 8.
        dtype: what `dense` gives.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.codes.shape

    def dense(self) -> Tensor:
        """The plain weight [out, in]."""
        groups = self.codes.view(len(self.codes), -1, GROUP).float()
        weight = groups * self.scale[..., None] + self.offset[..., None]
        return weight.view(self.shape).to(self.dtype)

    def to(self, device: torch.device, dtype: torch.dtype) -> GroupedWeight:
        """The same on another device, standing for a plain weight of another dtype."""
        return GroupedWeight(
            self.codes.to(device), self.scale.to(device), self.offset.to(device), self.bits, dtype
        )

    def rows(self, order: Tensor) -> GroupedWeight:
        """The outputs int64[n] in this order."""
        return replace(self, codes=self.codes[order], scale=self.scale[order], offset=self.offset[order])

    def part(self, rows: slice, columns: slice) -> GroupedWeight:
        """A copy of some outputs and inputs; `columns` begins and ends between groups."""
        start, stop, _ = columns.indices(self.shape[1])
        groups = slice(start // GROUP, stop // GROUP)
        return replace(
            self,
            codes=self.codes[rows, start:stop].clone(),
            scale=self.scale[rows, groups].clone(),
            offset=self.offset[rows, groups].clone(),
        )


Weight = Tensor | GroupedWeight


def dense(weight: Weight) -> Tensor:
    """A weight as a plain tensor."""
    return weight.dense() if isinstance(weight, GroupedWeight) else weight


def stack(weights: list[Weight]) -> Weight:
    """Weights of one input on top of each other; quantized only if all of them are."""
    if len(weights) == 1:
        return weights[0]
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if len(grouped) < len(weights):
        return torch.cat([dense(weight) for weight in weights])
    return GroupedWeight(
        codes=torch.cat([weight.codes for weight in grouped]),
        scale=torch.cat([weight.scale for weight in grouped]),
        offset=torch.cat([weight.offset for weight in grouped]),
        bits=max(weight.bits for weight in grouped),
        dtype=grouped[0].dtype,
    )
