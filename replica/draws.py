"""Drawing from logits in two parts: begun with the step, read when it is done.

On a GPU, rows that need nothing but their logits and parameters are drawn where those are, and only the
tokens come over; logits of the others are brought over for `replica.sampler`. That draws all rows of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replica.sampler import Row, Sampled, TokenLogprobs, sample
from replica.staging import Array, Fetched, Staging

SampleKernel = Callable[..., Tensor]

_MOST_IDS = np.iinfo(np.int32).max


class Draws(Protocol):
    """What is drawn for the rows of one step."""

    @property
    def tokens(self) -> Tensor | None:
        """int64[R] on the device, for the next step to start from; None if they are not all drawn there."""

    def result(self) -> Sampled:
        """Everything, as soon as it is known."""


def begin(logits: Tensor, rows: Sequence[Row], staging: Staging) -> Draws:
    """Draw a token for each row of logits[R, V], where that is best done."""
    kernel = _kernel(logits.device)
    return HostDraws(logits, rows) if kernel is None else DeviceDraws(logits, rows, staging, kernel)


class HostDraws:
    """Drawn at once, by the replica's sampler."""

    def __init__(self, logits: Tensor, rows: Sequence[Row]) -> None:
        self._device, self._plain = logits.device, all(row.plain for row in rows)
        self._sampled = sample(logits, rows)

    @property
    def tokens(self) -> Tensor | None:
        """As they are here, but only where a GPU would have them: both go the same way."""
        return torch.tensor(self._sampled.tokens, device=self._device) if self._plain else None

    def result(self) -> Sampled:
        """Known since the beginning."""
        return self._sampled


class DeviceDraws:
    """Plain rows are drawn on the device by `kernels.triton.sample`, others later on the host."""

    def __init__(self, logits: Tensor, rows: Sequence[Row], staging: Staging, kernel: SampleKernel) -> None:
        plain = [i for i, row in enumerate(rows) if row.plain]
        self._others = [i for i, row in enumerate(rows) if not row.plain]
        self._rows = rows
        self.tokens = None
        self._fetched_logits = None
        if not self._others:
            self.tokens = kernel(logits, *staging.put(_parameters(rows)))
            self._fetched = Fetched(self.tokens)
            return
        mine, others, *parameters = staging.put(
            [_places(plain), _places(self._others), *_parameters([rows[i] for i in plain])]
        )
        self._fetched = Fetched(kernel(logits[mine], *parameters))
        self._fetched_logits = Fetched(logits[others].float())

    def result(self) -> Sampled:
        """Waits for the device."""
        drawn = self._fetched.wait().tolist()
        if self._fetched_logits is None:
            return Sampled(drawn, [None] * len(drawn))
        rest = sample(self._fetched_logits.wait(), [self._rows[i] for i in self._others])
        tokens, logprobs = [0] * len(self._rows), list[TokenLogprobs | None]([None] * len(self._rows))
        for i, token, logprob in zip(self._others, rest.tokens, rest.logprobs, strict=True):
            tokens[i], logprobs[i] = token, logprob
        drawn.reverse()
        others = set(self._others)
        tokens = [token if i in others else drawn.pop() for i, token in enumerate(tokens)]
        return Sampled(tokens, logprobs)


def _places(rows: list[int]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)


def _parameters(rows: Sequence[Row]) -> list[Array]:
    """Arguments of the kernel, in their order."""
    params = [row.params for row in rows]
    return [
        np.array([0.0 if row.greedy else row.params.temperature for row in rows], dtype=np.float32),
        # As many as can be counted are all of any vocabulary.
        np.array([min(max(p.top_k, 0), _MOST_IDS) for p in params], dtype=np.int32),
        np.array([p.top_p for p in params], dtype=np.float32),
        np.array([p.min_p for p in params], dtype=np.float32),
        np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64),
        np.array([row.position for row in rows], dtype=np.int64),
    ]


def _kernel(device: torch.device) -> SampleKernel | None:
    """None where there is no GPU, or no Triton (of which `kernels.ops` has warned)."""
    if device.type != "cuda":
        return None
    try:
        from kernels.triton import sample as kernel
    except ImportError:
        return None
    return kernel
