"""The fast CPU paths against the float64 reference: odd shapes, poisoned memory, indifferent neighbours."""

import pytest
import torch

from kernels import cpu_torch, ops, reference

cpu = pytest.importorskip("kernels.cpu")

FAST = pytest.mark.parametrize("fast", [cpu, cpu_torch], ids=["cpu", "cpu_torch"])

SHAPES = [  # query heads, KV heads, head dim, block size
    (3, 1, 10, 4),
    (9, 3, 64, 16),
    (4, 4, 16, 7),
]
SEQUENCES = [  # (new tokens, context)
    [(1, 1)],
    [(1, 5), (1, 33), (1, 16)],
    [(1, 40), (5, 5), (7, 30), (1, 1), (32, 32)],
]
WINDOWS = [None, 1, 9, 100]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, tolerance=2e-6):
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f"relative error {error}"


def paged(sequences, kv_heads, dim, block_size, scattered):
    """Caches whose unused slots are NaN, and the sequences' tables into them."""
    per_seq = [-(-context // block_size) for _, context in sequences]
    num_blocks = sum(per_seq) + 3
    k_cache = torch.full((num_blocks, block_size, kv_heads, dim), float("nan"), dtype=torch.float64)
    v_cache = k_cache.clone()
    order = torch.arange(num_blocks)
    if scattered:
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5))
    tables = torch.full((len(sequences), max(per_seq) + 1), 10**6)
    for row, ((_, context), count) in enumerate(zip(sequences, per_seq, strict=True)):
        start = 1 + sum(per_seq[:row])
        tables[row, :count] = order[start : start + count]
        slots = torch.arange(context)
        slots = tables[row, slots // block_size] * block_size + slots % block_size
        k, v = normal(2, context, kv_heads, dim, seed=row)
        reference.kv_write(k, v, k_cache, v_cache, slots)
    seqs = ops.PagedSeqs(tuple(n for n, _ in sequences), tuple(c for _, c in sequences), tables, block_size)
    return k_cache, v_cache, seqs


@FAST
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_matches_float64_reference(fast, shape, sequences, window, scattered):
    heads, kv_heads, dim, block_size = shape
    k_cache, v_cache, seqs = paged(sequences, kv_heads, dim, block_size, scattered)
    q = normal(sum(n for n, _ in sequences), heads, dim, seed=9)
    expected = reference.paged_prefill(q, k_cache, v_cache, reference.plan(seqs, window), 0.3)
    assert not expected.isnan().any()
    caches = (k_cache.float(), v_cache.float())
    actual = fast.paged_prefill(q.float(), *caches, fast.plan(seqs, window), 0.3)
    close(actual, expected)
    if all(n == 1 for n, _ in sequences):
        close(fast.paged_decode(q.float(), *caches, fast.plan(seqs, window), 0.3), expected)


def adjacent(runs):
    """A block table of runs (first block, number of blocks)."""
    return torch.cat([torch.arange(first, first + count) for first, count in runs])[None]


@FAST
@pytest.mark.parametrize(
    "new, context", [(1, 900), (1, 897), (40, 900), (40, 890), (300, 900), (300, 1000), (900, 900)]
)
@pytest.mark.parametrize(
    "runs", [[(3, 63)], [(70, 20), (3, 43)], [(3, 50), (70, 13)], [(80, 13), (40, 20), (0, 30)]]
)
def test_long_contexts_in_few_runs(fast, runs, new, context):
    """Partial results joined, and the causal part cut at every place it can be."""
    block_size = 16
    table = adjacent(runs)
    slots = torch.arange(context)
    slots = table[0, slots // block_size] * block_size + slots % block_size
    k_cache = torch.full((100, block_size, 3, 8), float("nan"), dtype=torch.float64)
    v_cache = k_cache.clone()
    reference.kv_write(*normal(2, context, 3, 8, seed=1), k_cache, v_cache, slots)
    seqs, q = ops.PagedSeqs((new,), (context,), table, block_size), normal(new, 9, 8)
    expected = reference.paged_prefill(q, k_cache, v_cache, reference.plan(seqs, None), 0.9)
    caches, plan = (k_cache.float(), v_cache.float()), fast.plan(seqs, None)
    attend = fast.paged_decode if new == 1 else fast.paged_prefill
    close(attend(q.float(), *caches, plan, 0.9), expected)


def test_pieces_and_gathering():
    def pieces(new, context, *blocks):
        (seq,) = cpu_torch.plan(ops.PagedSeqs((new,), (context,), torch.tensor([blocks]), 100), None)
        return seq.blocks is not None, [(p.start, p.length, p.causal) for p in seq.pieces]

    assert pieces(1, 250, 5, 6, 7) == (False, [(500, 250, False)])
    assert pieces(250, 250, 5, 6, 7) == (False, [(500, 250, True)])
    assert pieces(20, 250, 5, 6, 7) == (False, [(500, 230, False), (730, 20, True)])
    assert pieces(1, 250, 5, 9, 10) == (False, [(500, 100, False), (900, 150, False)])
    assert pieces(50, 250, 5, 6, 9) == (False, [(500, 200, False), (900, 50, True)])
    assert pieces(60, 250, 5, 6, 9) == (True, [(0, 190, False), (190, 60, True)])
    assert pieces(1, 250, 5, 7, 9) == (True, [(0, 250, False)])


@FAST
def test_attention_reads_strided_queries(fast):
    """The model hands in a slice of the fused projection, whose rows are not adjacent."""
    k_cache, v_cache, seqs = paged([(1, 20), (1, 3)], 2, 8, 4, True)
    fused = normal(2, 9, 8)
    expected = reference.paged_decode(fused[:, :4], k_cache, v_cache, reference.plan(seqs, None), 1.0)
    actual = fast.paged_decode(
        fused.float()[:, :4], k_cache.float(), v_cache.float(), fast.plan(seqs, None), 1.0
    )
    close(actual, expected)


@FAST
@pytest.mark.parametrize("scattered", [False, True])
def test_decode_does_not_depend_on_neighbours(fast, scattered):
    sequences = [(1, 5), (1, 300), (1, 64), (1, 1)]
    k_cache, v_cache, seqs = (x for x in paged(sequences, 3, 64, 16, scattered))
    caches, q = (k_cache.float(), v_cache.float()), normal(4, 9, 64).float()
    together = fast.paged_decode(q, *caches, fast.plan(seqs, None), 0.125)
    for i, (_, context) in enumerate(sequences):
        one = ops.PagedSeqs((1,), (context,), seqs.block_tables[i : i + 1], 16)
        alone = fast.paged_decode(q[i : i + 1], *caches, fast.plan(one, None), 0.125)
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features, in_features", [(1, 1), (7, 13), (192, 576), (259, 64)])
def test_linear_matches_float64_reference(out_features, in_features, bias):
    weight = normal(out_features, in_features)
    offset = normal(out_features, seed=1) if bias else None
    run = cpu.pack_linear(weight.float(), None if offset is None else offset.float())
    for rows in (1, 2, 7, 64):
        x = normal(rows, in_features, seed=2)
        close(run(x.float()), reference.pack_linear(weight, offset)(x))


def test_linear_without_mkl():
    weight, bias, x = normal(65, 33), normal(65, seed=1), normal(5, 33, seed=2)
    run = cpu_torch._onednn_linear(weight.float(), bias.float())
    close(run(x.float()), reference.pack_linear(weight, bias)(x))


def test_a_wrong_packed_product_is_noticed():
    weight = normal(8, 16).float()
    assert cpu_torch._agrees(lambda x: x @ weight.T, weight, None)
    assert not cpu_torch._agrees(lambda x: x @ weight.T + 0.1, weight, None)
    assert not cpu_torch._agrees(
        lambda x: (x @ weight.T) * (1 if len(x) == 1 else float("nan")), weight, None
    )


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="only MKL's packed product promises it")
@pytest.mark.parametrize("out_features, in_features", [(960, 576), (576, 1536)])
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(out_features, in_features):
    run = cpu.pack_linear(normal(out_features, in_features).float(), None)
    x = normal(100, in_features, seed=1).float()
    whole = run(x)
    for first, end in [(0, 1), (3, 5), (7, 15), (20, 83)]:
        assert torch.equal(run(x[first:end]), whole[first:end])


@FAST
@pytest.mark.parametrize("shape", [(1, 5), (3, 576), (2, 3, 10)])
def test_rms_norm(fast, shape):
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    expected = reference.rms_norm(x, weight, 1e-5)
    by_hand = x / (x.pow(2).sum(-1, keepdim=True) / shape[-1] + 1e-5).sqrt() * weight
    assert torch.allclose(expected, by_hand, rtol=1e-12)
    close(fast.rms_norm(x.float(), weight.float(), 1e-5), expected)


@FAST
def test_silu_mul(fast):
    x = normal(5, 2 * 7)
    expected = reference.silu_mul(x)
    assert torch.allclose(expected, torch.nn.functional.silu(x[:, :7]) * x[:, 7:], rtol=1e-12)
    close(fast.silu_mul(x.float()), expected)


@FAST
def test_rope_turns_pairs_by_the_angle(fast):
    x, angle = normal(4, 5, 6), torch.tensor([[0.1, 1.0, 3.0]]) * torch.arange(4)[:, None]
    expected = reference.rope(x[:, :3], angle.cos(), angle.sin())
    pairs = (
        torch.complex(x[:, :3, :3], x[:, :3, 3:])
        * torch.polar(torch.ones(1).double(), angle.double())[:, None]
    )
    assert torch.allclose(expected, torch.cat((pairs.real, pairs.imag), -1), atol=1e-6)
    caches = [torch.full((1, 4, 1, 6), float("nan")) for _ in "kv"]
    mine = x.float()
    q = fast.rope_kv_write(mine, angle.cos(), angle.sin(), *caches, torch.arange(4))
    close(torch.cat([q, caches[0][0]], 1), reference.rope(x[:, :4], angle.cos(), angle.sin()))
    close(q, expected)
    assert torch.equal(caches[1][0], mine[:, 4:]) and torch.equal(mine[:, 4:], x[:, 4:].float())


@pytest.mark.parametrize("kernels", [reference, cpu, cpu_torch])
def test_tables_may_have_any_strides(kernels):
    x, angle = normal(64, 3, 16), torch.rand(8, 64, generator=torch.Generator().manual_seed(1)).T
    caches = [torch.full((4, 16, 1, 16), float("nan")) for _ in "kv"]
    q = kernels.rope_kv_write(x.float(), angle.cos(), angle.sin(), *caches, torch.arange(64))
    turned = reference.rope(x[:, :2], angle.cos(), angle.sin())
    close(q, turned[:, :1])
    close(caches[0].flatten(0, 1), turned[:, 1:])


@pytest.mark.parametrize("kernels", [reference, cpu, cpu_torch])
def test_a_write_touches_only_its_slots(kernels):
    caches = [torch.full((3, 4, 2, 6), float("nan")) for _ in "kv"]
    qkv, angle = normal(2, 6, 6).float(), torch.zeros(2, 3)
    expected = qkv.clone()
    kernels.rope_kv_write(qkv, angle.cos(), angle.sin(), *caches, torch.tensor([11, 2]))
    flat_k, flat_v = (cache.flatten(0, 1) for cache in caches)
    assert torch.equal(flat_k[[11, 2]], expected[:, 2:4]) and torch.equal(flat_v[[11, 2]], expected[:, 4:])
    assert flat_k.isnan().all((1, 2)).sum() == 10 and flat_v.isnan().all((1, 2)).sum() == 10


@pytest.mark.parametrize("kernels", [reference, cpu, cpu_torch])
def test_the_norm_of_a_sum_is_that_of_the_sum(kernels):
    x, residual, weight = normal(3, 8).float(), normal(3, 8, seed=1).float(), normal(8, seed=2).float()
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, kernels.rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("kernels", [reference, cpu, cpu_torch])
def test_block_copies_copy_the_heads_of_blocks_in_all_layers(kernels):
    caches = [(normal(3, 4, 1, 2, seed=i), normal(3, 4, 1, 2, seed=i + 9)) for i in range(2)]
    before = [(k.clone(), v.clone()) for k, v in caches]
    kernels.block_copies(kernels.layers_of(caches), [(0, 2, 3)])
    for pair, old_pair in zip(caches, before, strict=True):
        for cache, old in zip(pair, old_pair, strict=True):
            assert torch.equal(cache[2, :3], old[0, :3])
            assert torch.equal(cache[2, 3], old[2, 3])
            assert torch.equal(cache[:2], old[:2])


def test_selection(monkeypatch):
    here = torch.device("cpu")
    monkeypatch.delenv("WARMROUTE_KERNELS", raising=False)
    assert ops.select(here, torch.float32) is cpu
    assert ops.select(here, torch.float64) is reference
    monkeypatch.setenv("WARMROUTE_KERNELS", "reference")
    assert ops.select(here, torch.float32) is reference
    monkeypatch.setenv("WARMROUTE_KERNELS", "fastest")
    with pytest.raises(ValueError, match="known are reference, cpu"):
        ops.select(here, torch.float32)
