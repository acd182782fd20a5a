"""How long an engine step takes: a roofline in four numbers.

A step reads the weights once and computes its tokens, whichever takes longer; attention comes on top: prefill
by the pairs of tokens that meet, decode by the cached tokens that are read. The presets are derived from
public peak rates with the efficiencies below; `Timing.fitted` takes what `warmroute bench engine` measured.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from router.lab.errors import OptionError

COMPUTE_EFFICIENCY = 0.5
"""Share of a GPU's dense bf16 peak that a prefill reaches; published prefill rates lie around it."""
MEMORY_EFFICIENCY = 0.8
"""Share of the peak memory bandwidth that a decode reaches."""
LAUNCH_S = 0.002
"""What a step costs beside arithmetic: scheduling, launches, sampling."""


@dataclass(frozen=True)
class Gpu:
    """Peak dense bf16 flop/s, bytes/s and bytes of memory."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True)
class Shape:
    """A dense decoder: parameters, layers, query heads, KV heads, head dimension; bf16 throughout."""

    params: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


GPUS = {
    "a100": Gpu(312e12, 2.04e12, 80e9),
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
}
MODELS = {
    "8b": Shape(8.03e9, 32, 32, 8, 128),
    "70b": Shape(70.6e9, 80, 64, 8, 128),
}


@dataclass(frozen=True)
class Timing:
    """Seconds: `step_s` a step at least, `weights_s` to read the weights, `token_s` a computed token,
    `pair_s` a pair of a new and an earlier token in prefill attention, `kv_s` a token that a decode reads."""

    step_s: float
    weights_s: float
    token_s: float
    pair_s: float
    kv_s: float
    kv_bytes: int = 0  # of one token; 0: not known
    max_batch_tokens: int = 2048
    max_num_seqs: int = 256

    def prefill(self, tokens: int, pairs: float, decodes: int, context: int) -> float:
        """Seconds of a step: prefill tokens, beside `decodes` rows with `context` cached tokens in all."""
        work = max(self.weights_s, (tokens + decodes) * self.token_s)
        return self.step_s + work + pairs * self.pair_s + context * self.kv_s

    def decode(self, rows: int, context: int, steps: int = 1) -> float:
        """Seconds of so many steps in a row of pure decoding, contexts growing by a token a step."""
        work = max(self.weights_s, rows * self.token_s)
        once = self.step_s + work + context * self.kv_s
        return steps * once + rows * steps * (steps - 1) / 2 * self.kv_s

    def alone(self, tokens: int, hit: int) -> float:
        """Seconds until the first token of a prompt with so many tokens cached, on an engine of its own."""
        seconds, done = 0.0, min(hit, tokens - 1)
        while done < tokens:
            count = min(self.max_batch_tokens, tokens - done)
            seconds += self.prefill(count, count * (done + count / 2), 0, 0)
            done += count
        return seconds

    @cached_property
    def prefill_tokens_per_s(self) -> float:
        """Rate of a long prefill without attention: what a replica reports."""
        step = self.prefill(self.max_batch_tokens, 0, 0, 0)
        return self.max_batch_tokens / step

    @cached_property
    def attention(self) -> float:
        """How much more a token costs in a prefill for each token of its context, as a share."""
        return self.pair_s * self.prefill_tokens_per_s

    def slower(self, factor: float) -> "Timing":
        """The same engine on hardware that takes `factor` times as long."""
        names = ("step_s", "weights_s", "token_s", "pair_s", "kv_s")
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    @classmethod
    def named(cls, name: str) -> "Timing":
        """A preset, or fitted to a file with the JSON of `warmroute bench engine`. Raises `OptionError`."""
        if not name.endswith(".json"):
            return cls.preset(name)
        try:
            figures = json.loads(Path(name).read_text(encoding="utf-8"))
            return cls.fitted(figures["steps"])
        except OSError as error:
            raise OptionError(f"cannot read {name}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(f"{name} is no JSON of `warmroute bench engine`: {error!r}") from error

    @classmethod
    def preset(cls, name: str) -> "Timing":
        """From "h100-8b", "h200-70b-tp4", ...; tensor parallelism divides the work, without its overheads."""
        gpu, _, rest = name.partition("-")
        model, _, degree = rest.partition("-tp")
        if gpu not in GPUS or model not in MODELS or not re.fullmatch("[1-9][0-9]{0,3}", degree or "1"):
            raise OptionError(
                f"unknown timing {name!r}: GPU ({', '.join(GPUS)}) - model ({', '.join(MODELS)}), "
                "perhaps with -tpN, or a .json file"
            )
        return cls.of(GPUS[gpu], MODELS[model], int(degree or 1))

    @classmethod
    def of(cls, gpu: Gpu, shape: Shape, degree: int = 1) -> "Timing":
        """From peak rates; `degree` GPUs share the work."""
        flops, bandwidth = gpu.flops * COMPUTE_EFFICIENCY * degree, gpu.bandwidth * MEMORY_EFFICIENCY * degree
        return cls(
            step_s=LAUNCH_S,
            weights_s=2 * shape.params / bandwidth,
            token_s=2 * shape.params / flops,
            pair_s=4 * shape.layers * shape.heads * shape.head_dim / flops,
            kv_s=shape.kv_bytes / bandwidth,
            kv_bytes=shape.kv_bytes,
        )

    @classmethod
    def fitted(cls, steps: Sequence[Mapping[str, float]]) -> "Timing":
        """From the `steps` of `warmroute bench engine`: what each computed, and its `ms`.

        Least squares of relative errors; what would cost less than nothing costs nothing. Batch sizes and
        budget of a step are those of the CPU engine's defaults. Raises `OptionError` for impossible times.
        """
        work = np.array([_work(step) for step in steps])
        seconds = np.array([step["ms"] / 1000 for step in steps])
        sane = (work >= 0).all() and np.isfinite(work).all() and np.isfinite(seconds).all()
        if len(steps) < 4 or not (sane and (seconds > 0).all()):
            raise OptionError("at least 4 steps are needed, with times above 0 and no counts below")
        step_s, token_s, pair_s, kv_s = _least_squares(work / seconds[:, None])
        return cls(step_s, 0.0, token_s, pair_s, kv_s, max_batch_tokens=512, max_num_seqs=64)


def _work(step: Mapping[str, float]) -> tuple[float, ...]:
    """What a measured step pays for: itself, tokens, pairs of new and earlier ones, tokens a decode reads."""
    prefill = step["prefill_tokens"]
    pairs = prefill * (step["cached_tokens"] + prefill / 2)
    return 1.0, prefill + step["decodes"], pairs, step["context_tokens"]


def _least_squares(work: npt.NDArray[np.float64]) -> list[float]:
    """Costs, none below 0, so that each row of work, float64[steps, costs], costs about 1."""
    kept = list(range(work.shape[1]))
    while True:
        found = np.linalg.lstsq(work[:, kept], np.ones(len(work)), rcond=None)[0]
        if (found >= 0).all():
            costs = dict(zip(kept, found.tolist(), strict=True))
            return [costs.get(number, 0.0) for number in range(work.shape[1])]
        kept.remove(kept[int(found.argmin())])
