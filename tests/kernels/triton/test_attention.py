"""Paged attention against float64: odd lengths, groups, windows, caps, float8, indifferent neighbours."""

import importlib

import pytest
import torch

from kernels import ops, reference
from kernels import triton as fast
from kernels.triton import configs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

SHAPES = [  # query heads, KV heads, head dim, page, dtype, window, soft cap
    (2, 2, 64, 16, F32, None, None),
    (3, 1, 80, 16, F16, None, None),
    (8, 2, 128, 32, BF16, None, None),
    (8, 1, 96, 16, F16, 40, None),
    (4, 1, 256, 64, BF16, None, 5.0),
    (6, 2, 16, 16, F32, 17, 2.0),
    (1, 1, 10, 16, BF16, 1, None),
]


def new_and_prefix(page):
    """Lengths around a tile and prefixes around a page; one sequence is empty, one has nothing new."""
    pairs = [
        (1, 0),
        (0, 0),
        (63, 0),
        (129, 1),
        (1, page - 1),
        (2, page),
        (63, page + 1),
        (0, 5),
        (1, 3 * page),
    ]
    return [(new, new + prefix) for new, prefix in pairs]


def both(paged, normal, sequences, shape, kv_dtype=None):
    """Truth and the arguments of the fast path."""
    heads, kv_heads, dim, page, dtype, window, softcap = shape
    caches, seqs = paged(sequences, kv_heads, dim, page, kv_dtype or dtype)
    q = normal(sum(new for new, _ in sequences), heads, dim, dtype=dtype, seed=99)
    expected = reference.paged_prefill(q, *caches, reference.plan(seqs, window), 0.3, softcap=softcap)
    narrow = [cache.to(kv_dtype or dtype) for cache in caches]
    return expected, (q.to(dtype), *narrow, fast.plan(seqs, window), 0.3)


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(paged, normal, close, shape):
    expected, arguments = both(paged, normal, new_and_prefix(shape[3]), shape)
    close(fast.paged_prefill(*arguments, softcap=shape[6]), expected, shape[4])


@pytest.mark.parametrize("shape", SHAPES)
def test_decode(paged, normal, close, shape):
    page = shape[3]
    sequences = [(1, n) for n in (1, 63, 129, page - 1, page, page + 1, 2 * page, 300)]
    expected, arguments = both(paged, normal, sequences, shape)
    close(fast.paged_decode(*arguments, softcap=shape[6], piece=64), expected, shape[4])


def test_decode_in_one_piece_needs_no_second_launch(paged, normal, close, monkeypatch):
    shape = (8, 2, 64, 16, F16, None, None)
    expected, arguments = both(paged, normal, [(1, 200), (1, 3)], shape)
    monkeypatch.setattr(importlib.import_module("kernels.triton.paged_decode"), "join_kernel", None)
    close(fast.paged_decode(*arguments), expected, F16)


@pytest.mark.parametrize("piece", [64, 512])
def test_decode_without_context_gives_zeros(paged, normal, close, piece):
    """What fills up a batch of a fixed size."""
    shape = (4, 2, 16, 16, F32, None, None)
    caches, seqs = paged([(1, 70), (1, 5)], 2, 16, 16, F32)
    q = normal(3, 4, 16)
    padded = ops.PagedSeqs((1, 1, 1), (70, 5, 0), torch.cat([seqs.block_tables, seqs.block_tables[:1]]), 16)
    narrow = [cache.to(F32) for cache in caches]
    out = fast.paged_decode(q.to(F32), *narrow, fast.plan(padded, None), 0.3, piece=piece)
    expected = reference.paged_decode(q[:2], *caches, reference.plan(seqs, shape[5]), 0.3)
    close(out[:2], expected, F32)
    assert torch.equal(out[2], torch.zeros_like(out[2]))


@pytest.mark.parametrize("window", [None, 90])
def test_the_longest_contexts_are_cut_into_larger_pieces(paged, normal, close, window):
    shape = (4, 2, 16, 16, F32, window, None)
    expected, arguments = both(paged, normal, [(1, 300), (1, 64), (1, 1), (1, 129)], shape)
    close(fast.paged_decode(*arguments, piece=32, most_pieces=4), expected, F32)


@pytest.mark.parametrize("most", [2, 32])
@pytest.mark.parametrize("window", [None, 40])
def test_a_launch_for_the_longest_context_serves_all_contexts(paged, normal, device, window, most):
    """As a CUDA graph is replayed: the same tensors with other contexts in them, 0 for rows that fill up."""
    _, (q, k_cache, v_cache, _, scale) = both(
        paged, normal, [(1, 300), (1, 5), (1, 64)], (4, 2, 16, 16, F32, None, None)
    )
    _, seqs = paged([(1, 300), (1, 5), (1, 64)], 2, 16, 16, F32)
    tables = torch.full((3, 64), 10**6, dtype=torch.int32, device=device)
    contexts = torch.zeros(3, dtype=torch.int32, device=device)
    static = ops.PagedSeqs((1,) * 3, (1024,) * 3, seqs.block_tables[:, :0], 16)
    starts = torch.arange(4, dtype=torch.int32, device=device)
    plan = fast.plan(static, window, (tables, starts, contexts))
    options = {"piece": 32, "most_pieces": most}
    tables[:, : seqs.block_tables.shape[1]] = seqs.block_tables
    for lens in ((300, 5, 64), (0, 5, 0), (33, 0, 32)):
        contexts.copy_(torch.tensor(lens))
        eager = fast.plan(ops.PagedSeqs((1,) * 3, lens, seqs.block_tables, 16), window)
        expected = fast.paged_decode(q, k_cache, v_cache, eager, scale, **options)
        assert torch.equal(fast.paged_decode(q, k_cache, v_cache, plan, scale, **options), expected)
        assert all(not out.any() for out, length in zip(expected, lens, strict=True) if length == 0)


@pytest.mark.parametrize("attend", [fast.paged_prefill, fast.paged_decode])
def test_given_arrays_are_those_that_a_plan_makes(paged, normal, device, attend):
    decode = attend is fast.paged_decode
    sequences = [(1, 90), (1, 17)] if decode else [(5, 40), (33, 33)]
    _, (q, k_cache, v_cache, plan, scale) = both(paged, normal, sequences, (6, 2, 64, 16, F16, None, None))
    arrays = fast.plan_arrays(plan.seqs, ops.AttentionShape(3, 64, F16, device))
    assert len(arrays) == (3 if decode else 4)
    given = fast.plan(plan.seqs, None, [torch.from_numpy(array).to(device) for array in arrays])
    assert torch.equal(attend(q, k_cache, v_cache, given, scale), attend(q, k_cache, v_cache, plan, scale))


@pytest.mark.parametrize("attend", [fast.paged_prefill, fast.paged_decode])
def test_float8_caches(paged, normal, close, device, attend):
    decode = attend is fast.paged_decode
    sequences = [(1, 90), (1, 17)] if decode else [(5, 40), (33, 33)]
    options = {"piece": 32} if decode else {}
    caches, seqs = paged(sequences, 2, 64, 16, torch.float8_e4m3fn)
    q = normal(sum(new for new, _ in sequences), 6, 64, dtype=BF16, seed=99)
    scales = tuple(torch.tensor(pair, dtype=F32, device=device) for pair in ([0.5, 2.0], [3.0, 0.25]))
    expected = reference.paged_prefill(q, *caches, reference.plan(seqs, None), 0.2, kv_scales=scales)
    narrow = [cache.to(torch.float8_e4m3fn) for cache in caches]
    actual = attend(q.to(BF16), *narrow, fast.plan(seqs, None), 0.2, kv_scales=scales, **options)
    close(actual, expected, BF16)


def test_results_do_not_depend_on_neighbours(paged, normal):
    shape = (6, 2, 64, 16, F16, None, None)
    sequences = [(1, 5), (1, 300), (1, 64)]
    _, (q, k_cache, v_cache, plan, scale) = both(paged, normal, sequences, shape)
    together = fast.paged_decode(q, k_cache, v_cache, plan, scale, piece=64)
    for i, (new, context) in enumerate(sequences):
        one = ops.PagedSeqs((new,), (context,), plan.seqs.block_tables[i : i + 1], 16)
        alone = fast.paged_decode(q[i : i + 1], k_cache, v_cache, fast.plan(one, None), scale, piece=64)
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("attend", [fast.paged_prefill, fast.paged_decode])
def test_queries_and_caches_may_be_slices(paged, normal, close, attend):
    shape = (4, 2, 64, 16, F32, None, None)
    expected, (q, k_cache, v_cache, plan, scale) = both(paged, normal, [(1, 40), (1, 7)], shape)
    fused = torch.cat([q, q + 1], 1)[:, :4]
    joined = torch.stack([k_cache, v_cache], 2)
    assert not fused.is_contiguous() and not joined[:, :, 0].is_contiguous()
    close(attend(fused, joined[:, :, 0], joined[:, :, 1], plan, scale), expected, F32)


def test_a_batch_without_new_tokens(paged, normal, device):
    _, arguments = both(paged, normal, [(0, 0), (0, 9)], (2, 1, 16, 16, F32, None, None))
    assert fast.paged_prefill(*arguments).shape == (0, 2, 16)


def test_tiles_come_longest_first():
    seqs = ops.PagedSeqs((3, 0, 5), (3, 7, 25), torch.zeros(3, 2, dtype=torch.int64), 16)
    tiles = fast.plan(seqs, None).tiles(torch.device("cpu"), 4, 2)
    assert tiles.tolist() == [[2, 8], [2, 4], [2, 0], [0, 4], [0, 0]]


def test_head_dimensions_beyond_the_tables():
    assert [configs.padded(dim) for dim in (1, 16, 64, 80, 96, 128, 256)] == [16, 16, 64, 128, 128, 128, 256]
    for dim in (0, 257):
        with pytest.raises(ValueError, match=f"head dimension {dim}"):
            configs.padded(dim)
