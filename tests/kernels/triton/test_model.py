"""A whole model through the kernels answers as it does through the reference."""

import numpy as np
import pytest
import torch

from kernels import triton as fast
from replica import draws
from replica.batch import ForwardBatch
from replica.build import build_engine
from replica.config import EngineConfig
from replica.decode_graphs import PlainRecorder
from replica.models import load_model
from replica.request import Request, SamplingParams


def passes(device, dtype):
    """Logits of a prompt, of a batch of a decode, a chunk and a whole prompt, and of decodes alone."""
    model, _ = load_model("random:tiny", dtype, device)
    model.allocate_kv(8, 16)
    ids, blocks = np.arange(40) * 11 % 250 + 3, np.array([5, 2, 7])
    sequences = [
        [(ids[:20], 0, blocks[:2], 1)],
        [(ids[30:36], 0, np.array([1]), 1), (ids[20:21], 20, blocks[:2], 1), (ids[:9], 0, np.array([3]), 3)],
        [(ids[21:22], 21, blocks[:2], 1), (ids[9:10], 9, np.array([3]), 1)],
    ]
    return [model.forward(ForwardBatch.build(batch, 16)) for batch in sequences]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(device, monkeypatch, dtype):
    """As the reference's in float32, up to the rounding of each dtype."""
    monkeypatch.setenv("WARMROUTE_KERNELS", "reference")
    expected = passes(device, torch.float32)
    monkeypatch.setenv("WARMROUTE_KERNELS", "triton")
    for actual, truth in zip(passes(device, dtype), expected, strict=True):
        assert actual.dtype == dtype and actual.isfinite().all()
        bound = 1e-5 if dtype == torch.float32 else 0.05
        assert (actual - truth).abs().max() < bound * truth.abs().max()


def answers(device, dtype):
    """Two prompts with a common beginning: the second finds the first's blocks, and a part of one to copy."""
    settings = {"model": "random:tiny", "block_size": 16, "num_blocks": 12, "hash_secret": b"secret"}
    engine = build_engine(EngineConfig(**settings, device=device.type, dtype=dtype))
    prompt, found = np.arange(34, dtype=np.int32) * 7 % 250 + 3, []
    for name, tokens in (("a", prompt), ("b", np.concatenate([prompt[:27], prompt[:4]]))):
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        engine.add(Request(name, tokens, sampling))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        cached = next(output.start.cached_tokens for output in outputs if output.start)
        found.append((cached, [token for output in outputs for token in output.tokens]))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_tokens(device, monkeypatch, dtype):
    monkeypatch.setenv("WARMROUTE_KERNELS", "reference")
    expected = answers(device, dtype)
    monkeypatch.setenv("WARMROUTE_KERNELS", "triton")
    assert answers(device, dtype) == expected
    assert [(cached, len(tokens)) for cached, tokens in expected] == [(0, 3), (27, 3)]


def together(engine):
    """Answers of a greedy, a seeded and a reporting request that decode together."""
    wanted = [
        {"temperature": 0.0, "max_tokens": 9},
        {"temperature": 2.0, "seed": 3, "max_tokens": 12},
        {"temperature": 0.0, "logprobs": 1, "max_tokens": 4},
    ]
    for index, params in enumerate(wanted):
        tokens = np.arange(20 + index, dtype=np.int32) * 7 % 250 + 3
        engine.add(Request(str(index), tokens, SamplingParams(ignore_eos=True, **params)))
    found = {}
    while engine.has_work():
        for output in engine.step():
            assert output.failure is None
            found.setdefault(output.request_id, []).extend(output.tokens)
    return found


def test_everything_that_a_gpu_does(device, monkeypatch):
    """Recorded decodes, draws on the device and steps ahead of each other, against none of them."""
    settings = {"model": "random:tiny", "num_blocks": 24, "max_num_seqs": 4, "hash_secret": b"secret"}
    options = {"dtype": "float32", "max_model_len": 64, "device": device.type}
    plain = build_engine(EngineConfig(**settings, **options, overlap=False, cuda_graphs=False))
    monkeypatch.setenv("WARMROUTE_KERNELS", "triton")
    engine = build_engine(EngineConfig(**settings, **options, overlap=True))
    model = engine._runner._model
    if device.type == "cpu":
        monkeypatch.setattr(draws, "_kernel", lambda _: fast.sample)
        model.record_decodes(4, 64, PlainRecorder())
    replays = []
    replay = model._graphs.run
    model._graphs.run = lambda *args: replays.append(replay(*args)) or replays[-1]
    assert together(engine) == together(plain)
    assert sum(hidden is not None for hidden in replays) >= 8
    engine.cache.check()
    assert engine.cache.stats().held == 0
