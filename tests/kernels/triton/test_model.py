"""A whole model through the kernels answers as it does through the reference."""

import numpy as np

from replica.build import build_engine
from replica.config import EngineConfig
from replica.request import Request, SamplingParams


def answers(device):
    """Two prompts with a common beginning: the second finds the first's blocks, and a part of one to copy."""
    settings = {"model": "random:tiny", "block_size": 16, "num_blocks": 12, "hash_secret": b"secret"}
    engine = build_engine(EngineConfig(**settings, device=device.type, dtype="float32"))
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


def test_greedy_tokens(device, monkeypatch):
    monkeypatch.setenv("WARMROUTE_KERNELS", "reference")
    expected = answers(device)
    monkeypatch.setenv("WARMROUTE_KERNELS", "triton")
    assert answers(device) == expected
    assert [(cached, len(tokens)) for cached, tokens in expected] == [(0, 3), (27, 3)]
