"""Which part of a model each rank computes (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053).

Attention heads, the MLP's inner width and the vocabulary of the head are spread over the ranks. Projections
into heads or inner width are cut by outputs, those back by inputs, after which one sum over the ranks
completes attention or MLP. Norms and the embedding are whole on every rank: a split look-up would cost one
more sum in each step, to save the memory of one matrix of many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from replica.errors import ConfigError
from replica.model_config import ModelConfig


@dataclass(frozen=True)
class Shard:
    """Rank `rank` (0 ...) of `size` ranks. The methods give the rows that it holds of whole matrices."""

    rank: int = 0
    size: int = 1

    def heads(self, config: ModelConfig) -> slice:
        """Rows of the query projection, columns of the output projection."""
        return self._share(config.num_heads, config.head_dim)

    def kv_heads(self, config: ModelConfig) -> slice:
        """Rows of the key and value projections; with fewer KV heads than ranks, some ranks hold the same."""
        if config.num_kv_heads >= self.size:
            return self._share(config.num_kv_heads, config.head_dim)
        head = self.rank * config.num_kv_heads // self.size
        return slice(head * config.head_dim, (head + 1) * config.head_dim)

    def inner(self, config: ModelConfig) -> slice:
        """Rows of the gate and up projections, columns of the down projection."""
        return self._share(config.intermediate_size, 1)

    def vocabulary(self, config: ModelConfig) -> slice:
        """Rows of the head: equal shares, but for the last rank."""
        share = -(-config.vocab_size // self.size)
        return slice(self.rank * share, min((self.rank + 1) * share, config.vocab_size))

    def local(self, config: ModelConfig) -> ModelConfig:
        """The decoder that this rank computes: fewer heads, a narrower MLP; all the vocabulary."""
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def _share(self, count: int, unit: int) -> slice:
        share = count // self.size * unit
        return slice(self.rank * share, (self.rank + 1) * share)


def check_split(config: ModelConfig, size: int) -> None:
    """Raise `ConfigError` if a model cannot be spread over `size` ranks."""
    kv_heads = config.num_kv_heads
    if config.num_heads % size:
        _refuse(size, f"does not divide the model's {config.num_heads} attention heads")
    if kv_heads % size and size % kv_heads:
        _refuse(size, f"neither divides the model's {kv_heads} KV heads nor is a multiple of them")
    if config.intermediate_size % size:
        _refuse(size, f"does not divide the model's MLP, {config.intermediate_size} wide")
    last = Shard(size - 1, size).vocabulary(config)
    if last.start >= last.stop:
        _refuse(size, f"is too much for a vocabulary of {config.vocab_size}")


def _refuse(size: int, why: str) -> None:
    raise ConfigError(f"tensor_parallel {size} {why}")


class Collectives(Protocol):
    """What a rank's model needs of the other ranks. All ranks make the same calls in the same order."""

    shard: Shard

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x (which may be changed), in every rank."""

    def gather(self, x: Tensor, width: int) -> Tensor:
        """[n, width] of the ranks' columns x[n, at most ceil(width / size)], next to each other."""
