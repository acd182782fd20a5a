"""What a decoder looks like: sizes, RoPE and the switches between Llama-family relatives.

Read from GGUF metadata (`weights_gguf`) or a Hugging Face `config.json` (`weights_hf`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from replica.errors import UnsupportedModel


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched beyond the trained context.

    `kind` is one of default, linear, dynamic, llama3, yarn, factors. Formulas follow Hugging Face
    `transformers` (`modeling_rope_utils`); `factors` are per-frequency divisors as llama.cpp stores them
    (`rope_freqs.weight`).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder. `context_length` is in tokens; `digest` names the exact weights (hex)."""

    arch: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    sliding_window: int | None = None
    window_layers: frozenset[int] | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads do not divide into {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        if self.window_layers is not None and layer not in self.window_layers:
            return None
        return self.sliding_window

    @property
    def attention_tokens(self) -> int:
        """The context at which attending to it costs a token as much as all else: floating point operations
        of a layer's matrices over those for each token of context. Layers with a window count as cheap."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        matrices = self.hidden_size * (heads + self.num_heads * self.head_dim + 3 * self.intermediate_size)
        full = sum(self.window_of(layer) is None for layer in range(self.num_layers))
        return max(1, matrices * self.num_layers // (2 * self.num_heads * self.head_dim * max(full, 1)))

    def kv_bytes_per_token(self, element_size: int = 4) -> int:
        """Bytes of keys and values one token takes, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size


def rope_tables(config: ModelConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [context_length, head_dim // 2].

    Frequencies and angles are float32 as in `transformers`: a model is judged against the arithmetic it was
    trained with, and at position 8,000 float32 and float64 angles already differ by 5e-4.
    """
    freqs, scale = _frequencies(config)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), freqs)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    rope, dim = config.rope, config.head_dim
    freqs = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "default":
        return freqs, 1.0
    if rope.kind == "dynamic":
        # Dynamic NTK changes frequencies only beyond the trained context, which is where this engine stops:
        # frequencies that move with the length would make every cached key wrong.
        return freqs, 1.0
    if rope.kind == "linear":
        return freqs / rope.factor, 1.0
    if rope.kind == "factors":
        return freqs / torch.tensor(rope.factors, dtype=torch.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(freqs, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(freqs, rope, dim), _yarn_scale(rope)
    raise UnsupportedModel(f"rope scaling {rope.kind!r} is not implemented")


def _llama3(freqs: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    turns = rope.original_context * freqs / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return freqs / rope.factor * (1 - blend) + freqs * blend


def _yarn(freqs: torch.Tensor, rope: RopeConfig, dim: int) -> torch.Tensor:
    def turning_dim(turns: float) -> float:
        return dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turning_dim(rope.beta_fast), turning_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return freqs / rope.factor * ramp + freqs * (1 - ramp)


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
