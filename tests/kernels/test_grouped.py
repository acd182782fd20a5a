"""Products with quantized weights: against float64, into poisoned memory, the same for any number of rows."""

import logging
import sys
import threading

import pytest
import torch

from kernels import cpu_torch, ops, reference
from kernels.grouped import GROUP, GroupedWeight, stack

cpu = pytest.importorskip("kernels.cpu")
grouped_linear = pytest.importorskip("kernels.grouped_linear")

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 127, 128, 129, 260]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(out_features, in_features, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8, generator=generator)
    scale, offset = normal(2, out_features, in_features // GROUP, seed=seed + 1)
    return GroupedWeight(codes, scale, offset, bits)


def poison_new_memory(monkeypatch):
    """What torch.empty hands out is full of NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kw: empty(*args, **kw).fill_(float("nan")))


def test_dense_is_codes_times_scale_plus_offset():
    made = weight(3, 64, 4)
    by_hand = torch.empty(3, 64)
    for n in range(3):
        for k in range(64):
            by_hand[n, k] = made.codes[n, k].float() * made.scale[n, k // 32] + made.offset[n, k // 32]
    assert torch.equal(made.dense(), by_hand)
    half = made.to(torch.device("cpu"), torch.float16)
    assert torch.equal(half.dense(), by_hand.half())
    assert torch.equal(made.rows(torch.tensor([2, 0])).dense(), by_hand[[2, 0]])


def test_stacks_stay_quantized_only_together():
    four, eight = weight(3, 64, 4), weight(5, 64, 8, seed=3)
    both = stack([four, eight])
    assert isinstance(both, GroupedWeight) and both.bits == 8
    assert torch.equal(both.dense(), torch.cat([four.dense(), eight.dense()]))
    mixed = stack([four, eight.dense()])
    assert torch.equal(mixed, torch.cat([four.dense(), eight.dense()]))
    assert stack([four]) is four


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features, in_features", [(1, 32), (31, 96), (32, 192), (33, 224), (100, 576)])
def test_matches_float64(monkeypatch, out_features, in_features, bias, bits):
    made = weight(out_features, in_features, bits)
    offset = normal(out_features, seed=5) if bias else None
    run = cpu.pack_linear(made, offset)
    exact = reference.pack_linear(made.dense().double(), None if offset is None else offset.double())
    poison_new_memory(monkeypatch)
    for rows in (1, 7, 8, 9, 33, 300):
        x = normal(rows, in_features, seed=2)
        expected = exact(x.double())
        actual = run(x)
        assert actual.shape == expected.shape and actual.dtype == torch.float32
        assert (actual - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_the_same_among_any_number_of_rows(bits, threads):
    run, x = cpu.pack_linear(weight(65, 576, bits), normal(65)), normal(260, 576, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = run(x)
        for rows in ROWS:
            for first in (0, 260 - rows):
                assert torch.equal(run(x[first : first + rows]), whole[first : first + rows])
    finally:
        torch.set_num_threads(before)


def test_reads_strided_rows():
    run, wide = cpu.pack_linear(weight(40, 64, 4), None), normal(9, 100)
    assert torch.equal(run(wide[:, 20:84]), run(wide[:, 20:84].contiguous()))
    assert torch.equal(run(wide.T[20:84].T[:, :64]), run(wide[:, 20:84].contiguous()))


def test_no_rows():
    assert cpu.pack_linear(weight(40, 64, 4), None)(torch.empty(0, 64)).shape == (0, 40)


@pytest.mark.parametrize("kernels", [reference, cpu_torch])
def test_others_expand(kernels):
    made, x = weight(33, 64, 4), normal(5, 64)
    expected = x.double() @ made.dense().double().T
    assert (kernels.pack_linear(made, None)(x) - expected).abs().max() < 2e-6 * expected.abs().max()


def test_reference_computes_in_the_dtype_it_stands_for():
    made = weight(33, 64, 4).to(torch.device("cpu"), torch.float64)
    y = reference.pack_linear(made, None)(normal(2, 64).double())
    assert torch.equal(y, normal(2, 64).double() @ made.dense().T)


def test_two_threads_at_once():
    """Two engines in one process."""
    run, x = cpu.pack_linear(weight(1000, 576, 4), None), normal(8, 576)
    expected, wrong = run(x), []

    def work():
        torch.set_num_threads(2)
        wrong.extend(i for i in range(50) if not torch.equal(run(x), expected))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_numba_torch_takes_over(monkeypatch, caplog):
    """`None` in sys.modules makes the import fail like a package that is not installed."""
    for name in ("kernels.cpu", "kernels.parallel", "kernels.grouped_linear", "kernels.token_rows"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("decode_attention", "grouped_linear", "token_rows"):
        monkeypatch.delattr(f"kernels.{name}", raising=False)
        monkeypatch.delitem(sys.modules, f"kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setenv("WARMROUTE_KERNELS", "cpu")
    with caplog.at_level(logging.WARNING, "kernels.ops"):
        found = ops.select(torch.device("cpu"), torch.float32)
    assert found is cpu_torch
    assert "kernels.cpu cannot be used, kernels.cpu_torch is, slower" in caplog.text
    made, x = weight(33, 64, 4), normal(5, 64)
    expected = x.double() @ made.dense().double().T
    assert (found.pack_linear(made, None)(x) - expected).abs().max() < 2e-6 * expected.abs().max()


def test_compiled_kernels_read_float32_only(monkeypatch):
    monkeypatch.setenv("WARMROUTE_KERNELS", "cpu")
    with pytest.raises(ValueError, match="float32 on a CPU only"):
        ops.select(torch.device("cpu"), torch.float64)
