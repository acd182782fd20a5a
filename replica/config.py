"""What one engine is told at start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from kvcore.eviction import POLICIES
from replica.errors import ConfigError

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Names in torch of what weights and KV can be in."""

_DEVICES = r"auto|cpu|cuda(:\d{1,3})?"
_LEAST = {
    "block_size": 1,
    "num_blocks": 1,
    "max_batch_tokens": 1,
    "max_num_seqs": 1,
    "max_queue": 1,
    "max_model_len": 2,
    "max_failed_steps": 1,
    "threads": 1,
    "tensor_parallel": 1,
    "draft_tokens": 0,
}
_MOST = 2**31 - 2  # the spare block's id is an int32 too
_LONGEST_S = 1e6
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "bytes": bytes,
}
_WORDS = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and limits of one engine. Everything has a default that suits a laptop.

    Attributes:
        model: a known name ("smollm2-135m", "random:tiny"), a .gguf file or a Hugging Face folder.
        dtype: torch dtype of weights and KV; "auto" is bfloat16 on a GPU and float32 on a CPU.
        device: "cpu", "cuda" or "cuda:1"; "auto" is a GPU where there is one.
        block_size: tokens in a KV block.
        num_blocks: KV blocks in the pool. None takes what `memory_share` has room for on a GPU (see
            `replica.memory`), 1024 on a CPU. A block of smollm2-135m in float32 takes 720 KiB.
        memory_share: the part of a GPU's memory that may be in use, weights, steps, CUDA graphs, KV blocks
            and other processes together, when num_blocks is measured.
        cuda_graphs: replay recorded decode steps; None does so on a GPU.
        overlap: schedule and launch the next step while one is computing; None does so on a GPU. Answers are
            the same.
        max_batch_tokens: token budget of one step, decodes included. Larger prefill chunks are more
            efficient, smaller ones disturb running decodes less.
        max_num_seqs: sequences that run at once.
        max_queue: sequences that may wait; one more request is refused with `QueueFull`.
        max_model_len: longest prompt plus answer in tokens; None takes the model's context. Never more than
            fits into the pool.
        threads: torch threads of the engine's own thread, and of each other rank; None leaves torch's choice.
        tensor_parallel: processes (ranks) that compute the model together, each with its part of the weights
            and of every KV block, on a device of its own (CPUs are shared).
        parallel_timeout_s: how long a rank waits for the others in a step before the engine gives up.
        eviction: eviction policy of the prefix cache.
        draft_tokens: guesses that a decode checks beside its token, looked up in the sequence itself
            (speculative decoding); answers are the same with any number. 0 guesses nothing.
        hash_secret: key of the prefix hashes. Routers must hold the same one.
        replica_id: the name this engine answers by.
        poll_interval_s: how long a long poll gathers a burst of cache changes before it answers.
        max_failed_steps: failed steps in a row after which the engine gives up.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    memory_share: float = 0.9
    cuda_graphs: bool | None = None
    overlap: bool | None = None
    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    max_queue: int = 256
    max_model_len: int | None = None
    threads: int | None = None
    tensor_parallel: int = 1
    parallel_timeout_s: float = 60.0
    eviction: str = "reuse"
    draft_tokens: int = 0
    hash_secret: bytes | None = field(default=None, repr=False)
    replica_id: str = "replica-0"
    poll_interval_s: float = 0.005
    max_failed_steps: int = 3

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot work, whatever the machine; comparisons with NaN are false."""
        for each in fields(self):
            _check_type(each.name, str(each.type), getattr(self, each.name))
        for name, least in _LEAST.items():
            _check_range(name, getattr(self, name), least)
        _check_name("dtype", self.dtype, ("auto", *DTYPES))
        _check_name("eviction", self.eviction, tuple(POLICIES))
        if not re.fullmatch(_DEVICES, str(self.device)):
            raise ConfigError(f"device {self.device!r} is none of auto, cpu, cuda, and cuda:0, cuda:1, ...")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share must be above 0 and at most 1, not {self.memory_share}")
        if not 0 < self.parallel_timeout_s <= _LONGEST_S:
            raise ConfigError(
                f"parallel_timeout_s must be above 0 and at most {_LONGEST_S:g}, "
                f"not {self.parallel_timeout_s}"
            )
        if not 0 <= self.poll_interval_s <= _LONGEST_S:
            raise ConfigError(
                f"poll_interval_s must be 0 to {_LONGEST_S:g} seconds, not {self.poll_interval_s}"
            )
        if self.num_blocks is not None and not self.num_blocks * self.block_size >= 2:
            raise ConfigError("num_blocks 1 of block_size 1 has no room for a prompt and an answer")
        if self.max_batch_tokens < self.max_num_seqs:
            # Otherwise decodes alone could use up every step, and a prefill would never come to run.
            raise ConfigError(
                f"max_batch_tokens ({self.max_batch_tokens}) must not be below "
                f"max_num_seqs ({self.max_num_seqs})"
            )

    @property
    def layout(self) -> str:
        """Names the format of the KV, a part of the cache namespace: blocks of another layout never match.

        Of a configuration whose dtype is settled. With several ranks a block is in as many pieces, each with
        some of the heads, and its numbers are rounded in another order than one process would.
        """
        ranks = f"-tp{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{self.dtype}-b{self.block_size}{ranks}"


def _check_type(name: str, annotation: str, value: Any) -> None:
    """Raise `ConfigError` unless a value read from YAML is what a field's annotation says."""
    kind, _, optional = annotation.partition(" | ")
    if optional and value is None:
        return
    # To Python, true is a whole number.
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{name} must be {_WORDS.get(kind, kind)}, not {value!r}")


def _check_range(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, not {value}")
    if value is not None and value > _MOST:
        raise ConfigError(f"{name} must be at most {_MOST}, not {value}")


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is none of {', '.join(known)}")
