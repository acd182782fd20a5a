"""A tiny real engine, and a way to run requests through it to the end."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from replica.build import build_engine
from replica.config import EngineConfig
from replica.request import Request, SamplingParams


@dataclass
class Result:
    """What became of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    reason: dict[int, str] = field(default_factory=dict)
    outputs: list = field(default_factory=list)
    start: object = None
    usage: object = None
    failure: object = None

    def take(self, output):
        self.outputs.append(output)
        self.start = self.start or output.start
        self.usage, self.failure = output.usage, output.failure
        if output.failure is None:
            self.tokens.setdefault(output.index, []).extend(output.tokens)
            self.text[output.index] = self.text.get(output.index, "") + output.text
            if output.finish_reason is not None:
                self.reason[output.index] = output.finish_reason


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    """Tiny operations on several threads mostly wait for each other, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_engine():
    """Builds an engine of `random:tiny`: small blocks, one thread's worth of work a step."""

    def build(**settings):
        defaults = {"model": "random:tiny", "block_size": 4, "num_blocks": 512, "hash_secret": b"secret"}
        return build_engine(EngineConfig(**{**defaults, **settings}))

    return build


@pytest.fixture(scope="session")
def ask():
    """Makes a request from a list of tokens."""

    def build(request_id, tokens, *, read=True, publish=True, tenant=None, **params):
        sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params})
        prompt = np.array(tokens, dtype=np.int32)
        return Request(request_id, prompt, sampling, tenant, read=read, publish=publish)

    return build


@pytest.fixture(scope="session")
def run_all():
    """Steps an engine until it is idle; results by request id."""

    def run(engine, requests=(), max_steps=20_000):
        results = {}
        for request in requests:
            engine.add(request)
        for _ in range(max_steps):
            if not engine.has_work():
                return results
            for output in engine.step():
                results.setdefault(output.request_id, Result()).take(output)
        raise AssertionError(f"still busy after {max_steps} steps")

    return run
