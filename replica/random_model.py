"""`random:tiny`: a small random Llama with a byte-level tokenizer, the same on every machine.

It talks nonsense deterministically, which is what tests of everything around a model need.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from replica.model_config import ModelConfig, RopeConfig
from replica.random_names import TINY

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SEED = 20240229


def tiny_config() -> ModelConfig:
    """Two layers, 4 heads over 2 KV heads, 4,096 tokens of context."""
    return ModelConfig(
        arch="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_length=4096,
        rope=RopeConfig(theta=10000.0),
    )


def tiny_digest() -> str:
    """Names the weights: they follow from the shape and the seed."""
    return hashlib.sha256(f"{TINY} {tiny_config()} {_SEED}".encode()).hexdigest()


class RandomWeights:
    """Seeded normal weights, scaled so that activations keep their size and logits differ clearly."""

    def __init__(self, config: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = {"model.embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden)}
        for index in range(config.num_layers):
            at = f"model.layers.{index}"
            shapes |= {f"{at}.self_attn.q_proj": (q, hidden), f"{at}.self_attn.o_proj": (hidden, q)}
            shapes |= {f"{at}.self_attn.{p}_proj": (kv, hidden) for p in "kv"}
            shapes |= {f"{at}.mlp.{p}_proj": (inner, hidden) for p in ("gate", "up")}
            shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
        self._tensors = {
            f"{name}.weight": torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5
            for name, shape in shapes.items()
        }
        norms = [f"model.layers.{i}.{n}_layernorm" for i in range(config.num_layers) for n in _NORMS]
        self._tensors |= {f"{name}.weight": torch.ones(hidden) for name in [*norms, "model.norm"]}

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None."""
        return self._tensors.get(name)


_NORMS = ("input", "post_attention")
