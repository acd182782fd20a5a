"""Recorded decode steps give what plain ones give, bit for bit, and touch nothing else."""

import numpy as np
import pytest
import torch

from replica.batch import ForwardBatch
from replica.decode_graphs import CudaRecorder, PlainRecorder
from replica.models import load_model

PAGE, BLOCKS, LONGEST = 4, 12, 40
IDS = np.arange(40) * 11 % 250 + 3
TABLES = [np.array([5, 2, 7, 0, 1, 3]), np.array([4, 6]), np.array([8, 9, 10])]
LENS = (21, 5, 9)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def model(request, device, monkeypatch):
    """The tiny model after three prompts; what is not theirs is NaN."""
    monkeypatch.setenv("WARMROUTE_KERNELS", "triton")
    found, _ = load_model("random:tiny", request.param, device)
    found.allocate_kv(BLOCKS, PAGE)
    for pair in found.kv_cache.layers:
        for cache in pair:
            cache.fill_(float("nan"))
    prompts = [(IDS[:n], 0, table, 0) for n, table in zip(LENS, TABLES, strict=True)]
    found.forward(ForwardBatch.build(prompts, PAGE))
    return found


def decodes(count, after=0):
    parts = list(zip(LENS, TABLES, strict=True))[:count]
    return ForwardBatch.build(
        [(IDS[n + after : n + after + 1], n + after, table, 1) for n, table in parts], PAGE
    )


def caches_of(model):
    return torch.stack([cache for pair in model.kv_cache.layers for cache in pair])


def record(model, most=4):
    recorder = CudaRecorder(model.device) if model.device.type == "cuda" else PlainRecorder()
    model.record_decodes(most, LONGEST, recorder)
    return torch.inference_mode()(lambda batch: model._graphs.run(batch, None))


def same(actual, expected):
    """On a GPU the products of a padded batch may be rounded otherwise."""
    if actual.device.type == "cpu":
        return torch.equal(actual, expected)
    bound = 1e-4 if actual.dtype == torch.float32 else 0.03
    return bool((actual - expected).abs().max() < bound * expected.abs().max())


def test_same_logits_and_keys(model):
    batches = [decodes(3), decodes(1, 1), decodes(2, 1), decodes(2, 2)]
    before = caches_of(model).clone()
    plain, expected = [model.forward(batch) for batch in batches], caches_of(model).clone()
    for cache, old in zip((c for pair in model.kv_cache.layers for c in pair), before, strict=True):
        cache.copy_(old)
    replay = record(model)
    for batch, logits in zip(batches, plain, strict=True):
        assert replay(batch) is not None
        assert same(model.forward(batch), logits)
    assert not torch.cat(plain).isnan().any()
    after = caches_of(model)
    assert torch.equal(after[:, :BLOCKS].isnan(), expected[:, :BLOCKS].isnan())
    assert same(after[:, :BLOCKS].nan_to_num(), expected[:, :BLOCKS].nan_to_num())
    # Rows that were left over have written to the first slot of the spare block, and to nothing else.
    assert after[:, BLOCKS, 0].isfinite().all() and after[:, BLOCKS, 1:].isnan().all()


def test_tokens_drawn_by_the_step_before(model):
    record(model)
    known = model.forward(decodes(3))
    batch = decodes(3)
    drawn = torch.tensor([-1, *batch.token_ids[::-1]], device=model.device)
    batch.token_ids[:] = [-4, -3, -2]
    assert torch.equal(model.forward(batch, drawn), known)
    model._graphs = None
    assert same(model.forward(batch, drawn), known)


def test_other_batches_are_not_replayed(model):
    replay = record(model, most=2)
    chunk = ForwardBatch.build([(IDS[5:7], 5, TABLES[1], 1)], PAGE)
    silent = ForwardBatch.build([(IDS[5:6], 5, TABLES[1], 0)], PAGE)
    far = ForwardBatch.build([(IDS[:1], LONGEST, np.arange(11), 1)], PAGE)
    for batch in (chunk, silent, far, decodes(3)):
        assert replay(batch) is None
        assert model.forward(batch).shape == (len(batch.logit_rows), 259)
    assert replay(decodes(2)).shape == (2, 64)
