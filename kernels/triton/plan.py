"""What attention needs to know once per forward pass, made on the host and kept on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.ops import PagedSeqs


@dataclass(frozen=True)
class DeviceSeqs:
    """The sequences as int32 tensors of one device.

    Attributes:
        tables: [S, max_blocks].
        starts: [S + 1], row of each sequence's first new token, then their number.
        contexts: [S], cached prefix plus new tokens.
    """

    tables: Tensor
    starts: Tensor
    contexts: Tensor


@dataclass(frozen=True)
class Plan:
    """Sequences and window; device tensors are made when first asked for and serve all layers."""

    seqs: PagedSeqs
    window: int | None
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> DeviceSeqs:
        """The sequences on a device."""
        if device not in self._made:
            seqs = self.seqs
            lens = torch.tensor([0, *seqs.query_lens])
            parts = (seqs.block_tables, lens.cumsum(0), torch.tensor(seqs.context_lens, dtype=torch.int64))
            self._made[device] = DeviceSeqs(*(part.to(device, torch.int32) for part in parts))
        return self._made[device]

    def tiles(self, device: torch.device, rows: int, group: int) -> Tensor:
        """int32[n, 2]: (sequence, first row) of prefill tiles of so many (token, query head) rows.

        The longest come first, so that none is left running alone at the end.
        """
        key = (device, rows, group)
        if key not in self._made:
            pairs = [
                (context - new + first // group, seq, first)
                for seq, (new, context) in enumerate(
                    zip(self.seqs.query_lens, self.seqs.context_lens, strict=True)
                )
                for first in range(0, new * group, rows)
            ]
            order = [pair[1:] for pair in sorted(pairs, reverse=True)]
            made = torch.tensor(order, dtype=torch.int32).view(-1, 2)
            self._made[key] = made.to(device)
        return self._made[key]

    @property
    def longest(self) -> int:
        """Most cached tokens that a new token sees in any sequence."""
        seen = max(self.seqs.context_lens, default=0)
        return seen if self.window is None else min(seen, self.window)


def plan(seqs: PagedSeqs, window: int | None) -> Plan:
    """Keep the arguments; what the device needs follows when the device is known."""
    return Plan(seqs, window)


def cache_bytes(cache: Tensor) -> Tensor:
    """A float8 cache as uint8, any other as it is."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def scale_pointers(kv_scales: tuple[Tensor, Tensor] | None, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of a float8 cache, or any two tensors of the device where there are none."""
    return (stand_in, stand_in) if kv_scales is None else kv_scales
