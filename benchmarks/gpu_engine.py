"""The whole engine on a GPU: decode rates beside the least time to read the bytes, and time to first token.

`python benchmarks/gpu.py --only engine` runs it. The model has random weights of the shape of an 8B Llama,
made on the device; what it says is nonsense, and nobody detokenizes it. The floor of a decode step is the
time to read all weights once and the keys and values of every sequence, at the bandwidth of a plain copy.
"""

import statistics
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from replica.assemble import assemble, settled
from replica.config import EngineConfig
from replica.model import Model
from replica.model_config import ModelConfig, RopeConfig
from replica.random_model import tiny_config
from replica.request import Request, SamplingParams

SHAPE_8B = ModelConfig(
    arch="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    context_length=16_384,
    rope=RopeConfig(theta=500_000.0),
    digest="random 8B",
)


@dataclass(frozen=True)
class Load:
    """What is asked of the engine.

    Attributes:
        batches: sequences that decode together.
        context: tokens of each one's prompt.
        steps: decode steps that are timed.
        prompt, cached: tokens of a prompt that is answered alone, and of its beginning that is cached.
    """

    shape: ModelConfig
    batches: tuple[int, ...]
    context: int
    steps: int
    prompt: int
    cached: int
    repeats: int
    settings: dict


FULL = Load(SHAPE_8B, (1, 32, 128), 1024, 64, 8192, 7680, 3, {"max_batch_tokens": 8192, "max_num_seqs": 128})
TINY = Load(
    tiny_config(), (1, 3), 20, 6, 64, 48, 1, {"max_batch_tokens": 64, "max_num_seqs": 4, "num_blocks": 64}
)


class RandomOnDevice:
    """Normal weights, scaled so that activations keep their size, made where they are used."""

    def __init__(self, shape, dtype, device):
        self._generator = torch.Generator(device).manual_seed(0)
        self._options = {"dtype": dtype, "device": device}
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self._ends = {
            "embed_tokens.weight": (shape.vocab_size, hidden),
            "lm_head.weight": (shape.vocab_size, hidden),
            "q_proj.weight": (q, hidden),
            "k_proj.weight": (kv, hidden),
            "v_proj.weight": (kv, hidden),
            "o_proj.weight": (hidden, q),
            "gate_proj.weight": (inner, hidden),
            "up_proj.weight": (inner, hidden),
            "down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
        }

    def get(self, name):
        """The tensor, or None; not kept."""
        for end, size in self._ends.items():
            if name.endswith(end) and not name.endswith(("q_norm.weight", "k_norm.weight")):
                if len(size) == 1:
                    return torch.ones(size, **self._options)
                values = torch.randn(size, generator=self._generator, **self._options)
                return values.mul_(size[-1] ** -0.5)
        return None


class Silent:
    """A tokenizer for tokens that mean nothing."""

    eos_ids = frozenset()

    def token_bytes(self, token_id):
        return b""

    def is_special(self, token_id):
        return True


def measure(device, tiny, bandwidth):
    """Rows (name, ms, floor in ms or None, note) of the table; `bandwidth` in bytes/s."""
    load = TINY if tiny else FULL
    config = settled(EngineConfig(model="random", device=str(device), hash_secret=b"bench", **load.settings))
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    model = Model(load.shape, RandomOnDevice(load.shape, dtype, device), dtype, device)
    variants = {"": {}, ", no graphs": {"cuda_graphs": False}, ", no overlap": {"overlap": False}}
    rows = []
    for name, options in variants.items():
        engine = assemble(replace(config, **options), model, Silent())
        prompts = Prompts(load.shape.vocab_size)
        first_token(engine, prompts.next(load.context))  # compiles what is left
        for batch in load.batches:
            rows.append(decode_row(engine, prompts, load, batch, bandwidth, name))
        if not options:
            rows += first_token_rows(engine, prompts, load)
    return rows


class Prompts:
    """Different random prompts, the same ones in every run."""

    def __init__(self, vocab_size):
        self._random, self._vocab = np.random.default_rng(0), vocab_size

    def next(self, length):
        return self._random.integers(0, self._vocab, length, dtype=np.int32)


def decode_row(engine, prompts, load, batch, bandwidth, name):
    ms = decode_ms(engine, [prompts.next(load.context) for _ in range(batch)], load.steps)
    floor = step_bytes(load.shape, batch, load.context + load.steps // 2, engine.config.dtype) / bandwidth
    return f"decode, batch {batch}{name}", ms, floor * 1e3, f"{batch / ms * 1e3:,.0f} tokens/s"


def step_bytes(shape, batch, context, dtype):
    """What a decode step has to read: every weight but the embedding, and each sequence's keys and values."""
    size = getattr(torch, dtype).itemsize
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
    weights = (shape.num_layers * layer + shape.vocab_size * shape.hidden_size) * size
    return weights + batch * context * shape.kv_bytes_per_token(size)


def decode_ms(engine, prompts, steps):
    """Milliseconds of a step in which all prompts decode together."""
    names = [f"decode-{index}" for index in range(len(prompts))]
    most = steps + 2 * len(prompts) + 4  # the first ones decode while others are computed
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(request(name, prompt, most))
    begun = set()
    while len(begun) < len(names):
        begun |= {output.request_id for output in engine.step()}
    engine.step()  # the first that only decodes
    started = time.perf_counter()
    drawn = sum(len(engine.step()) for _ in range(steps))
    seconds = time.perf_counter() - started
    assert drawn == steps * len(prompts), "every sequence decodes in every step"
    finish(engine, names)
    return seconds / steps * 1e3


def first_token_rows(engine, prompts, load):
    cold, warm = [], []
    for _ in range(load.repeats):
        beginning = prompts.next(load.cached)
        first_token(engine, beginning)
        rest = prompts.next(load.prompt - load.cached)
        warm.append(first_token(engine, np.concatenate((beginning, rest))))
        cold.append(first_token(engine, prompts.next(load.prompt)))
    rows = {f"{load.prompt:,} tokens": cold, f"{load.cached:,} of {load.prompt:,} cached": warm}
    return [
        (f"first token, {name}", statistics.median(times) * 1e3, None, f"of {len(times)}")
        for name, times in rows.items()
    ]


def first_token(engine, prompt):
    """Seconds from `add` to the first token; the rest of the answer is dropped then."""
    started = time.perf_counter()
    engine.add(request("first", prompt, 8))
    while not engine.step():
        pass
    seconds = time.perf_counter() - started
    finish(engine, ["first"])
    return seconds


def finish(engine, names):
    """Drop requests, and collect what is still running."""
    for name in names:
        engine.abort(name)
    while engine.has_work():
        engine.step()


def request(name, prompt, max_tokens):
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
