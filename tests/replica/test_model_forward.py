"""The paged model: however a sequence is cut, batched or placed, its logits are those of one plain pass."""

import numpy as np
import pytest
import torch

from kernels.grouped import GroupedWeight
from replica.batch import ForwardBatch
from replica.errors import CorruptModel
from replica.model import Model
from replica.models import load_model
from replica.random_model import RandomWeights, tiny_config

BLOCK = 4
IDS = np.arange(3, 3 + 37) * 7 % 256 + 3


@pytest.fixture(scope="module")
def model():
    return load_model("random:tiny")[0]


@pytest.fixture
def empty(model):
    model.allocate_kv(64, BLOCK)
    return model


def run(model, *sequences):
    return model.forward(ForwardBatch.build(sequences, BLOCK))


def plain(model, ids=IDS):
    return run(model, (ids, 0, np.arange(40, 40 + -(-len(ids) // BLOCK)), True))[0]


def close(a, b):
    return torch.allclose(a, b, atol=1e-5, rtol=0)


def test_batch_layout():
    batch = ForwardBatch.build(
        [([5, 6, 7], 2, np.array([9, 4]), False), ([8], 4, np.array([1, 2]), True)], block_size=4
    )
    assert batch.token_ids.tolist() == [5, 6, 7, 8]
    assert batch.positions.tolist() == [2, 3, 4, 4]
    assert batch.slots.tolist() == [38, 39, 16, 8]
    assert batch.query_lens.tolist() == [3, 1]
    assert batch.context_lens.tolist() == [5, 5]
    assert batch.logit_rows.tolist() == [3]
    assert (batch.num_tokens, batch.num_seqs) == (4, 2)


def test_decodes_first_keeps_the_order_of_logits():
    batch = ForwardBatch.build(
        [([5, 6], 0, np.array([0]), True), ([7], 1, np.array([1]), True), ([8, 9], 0, np.array([2]), True)], 4
    )
    moved = batch.decodes_first()
    assert moved.token_ids.tolist() == [7, 5, 6, 8, 9]
    assert moved.query_lens.tolist() == [1, 2, 2]
    assert moved.block_tables.tolist() == [[1], [0], [2]]
    assert (
        moved.token_ids[moved.logit_rows].tolist() == batch.token_ids[batch.logit_rows].tolist() == [6, 7, 9]
    )
    assert moved.decodes_first() is moved


def test_chunks_and_scattered_blocks_change_nothing(empty):
    table = np.array([63, 3, 17, 4, 5, 20, 1, 0, 9, 30])
    run(empty, (IDS[:5], 0, table, False))
    run(empty, (IDS[5:6], 5, table, False))
    run(empty, (IDS[6:30], 6, table, False))
    assert close(run(empty, (IDS[30:], 30, table, True))[0], plain(empty))


def test_decoding_token_by_token_equals_one_prefill(empty):
    table = np.arange(12, 22)
    for position in range(len(IDS)):
        logits = run(empty, (IDS[position : position + 1], position, table, True))
    assert close(logits[0], plain(empty))


def test_a_cached_prefix_is_shared(empty):
    shared = np.arange(0, 5)
    run(empty, (IDS[:20], 0, shared, False))
    for tail in (IDS[20:], IDS[20:][::-1]):
        table = np.array([*shared, 11, 13, 12, 14, 15])
        ids = np.concatenate([IDS[:20], tail])
        assert close(run(empty, (tail, 20, table, True))[0], plain(empty, ids))


def test_mixed_batch_in_any_order(empty):
    tables = [np.arange(0, 10), np.arange(10, 20), np.arange(20, 30)]
    run(empty, (IDS[:36], 0, tables[0], False), (IDS[:10], 0, tables[1], False))
    logits = run(
        empty, (IDS[10:], 10, tables[1], True), (IDS[36:], 36, tables[0], True), (IDS, 0, tables[2], True)
    )
    expected = plain(empty)
    assert all(close(row, expected) for row in logits)


def test_neighbours_change_no_bit_of_a_decode(empty):
    lengths = [36, 3, 17, 30]
    tables = [np.arange(i * 10, i * 10 + 10) for i in range(4)]
    for n, table in zip(lengths, tables, strict=True):
        run(empty, (IDS[:n], 0, table, False))
    together = run(empty, *((IDS[n : n + 1], n, t, True) for n, t in zip(lengths, tables, strict=True)))
    for row, n, table in zip(together, lengths, tables, strict=True):
        assert torch.equal(row, run(empty, (IDS[n : n + 1], n, table, True))[0])


def test_copied_blocks_continue_as_the_original(empty):
    run(empty, (IDS[:10], 0, np.array([0, 1, 2]), False))
    empty.copy_blocks([(2, 7, 2)])
    ids = np.concatenate([IDS[:10], IDS[20:25]])
    assert close(run(empty, (IDS[20:25], 10, np.array([0, 1, 7, 8]), True))[0], plain(empty, ids))


def test_unused_memory_is_never_read(empty):
    expected = plain(empty)
    empty.allocate_kv(64, BLOCK)
    for k, v in empty.kv_cache.layers:
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    assert torch.equal(plain(empty), expected)
    table = np.array([2, 9, 4, 30, 31, 33, 12, 1, 5, 6])
    run(empty, (IDS[:36], 0, table, False))
    assert close(run(empty, (IDS[36:], 36, table, True))[0], expected)


def test_only_wanted_rows_get_logits(empty):
    none = run(empty, (IDS, 0, np.arange(10), False))
    assert none.shape == (0, empty.config.vocab_size)
    batch = ForwardBatch.build([(IDS, 0, np.arange(10), True)], BLOCK)
    every = ForwardBatch(**{**vars(batch), "logit_rows": np.arange(len(IDS))})
    logits = empty.forward(every)
    assert logits.shape == (len(IDS), empty.config.vocab_size)
    for end in (1, 9, 37):
        assert close(logits[end - 1], plain(empty, IDS[:end]))


def test_float64_reference_agrees(empty):
    exact, _ = load_model("random:tiny", dtype=torch.float64)
    exact.allocate_kv(64, BLOCK)
    assert torch.allclose(plain(exact).float(), plain(empty), atol=1e-4)


def test_the_random_model_is_the_same_every_time(empty):
    again, config = load_model("random:tiny")
    again.allocate_kv(64, BLOCK)
    assert torch.equal(plain(again), plain(empty))
    assert config.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4


def test_kv_memory_is_taken_only_when_written(model):
    model.allocate_kv(2_000_000, 16)  # 16 GiB
    assert run_one(model).shape == (1, model.config.vocab_size)
    model.allocate_kv(1, BLOCK)


def run_one(model):
    return model.forward(ForwardBatch.build([(IDS[:3], 0, np.array([1_999_999]), True)], 16))


class Without:
    def __init__(self, name, replacement=None):
        self.inner, self.name, self.replacement = RandomWeights(tiny_config()), name, replacement

    def get(self, name):
        return self.replacement if name == self.name else self.inner.get(name)


def test_missing_and_misshapen_tensors_are_named():
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CorruptModel, match=f"no tensor '{name}'"):
        Model(tiny_config(), Without(name), torch.float32, torch.device("cpu"))
    with pytest.raises(CorruptModel, match=r"up_proj.*\(3, 64\).*\(128, 64\)"):
        Model(tiny_config(), Without(name, torch.zeros(3, 64)), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_named(number):
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = torch.zeros(128, 64)
    damaged[100, 7] = number
    codes, plain = torch.zeros(128, 64, dtype=torch.uint8), torch.zeros(128, 2)
    for scale, offset in ((damaged[:, 6:8], plain), (plain, damaged[:, 6:8])):
        source = Without(name)
        source.grouped = {name: GroupedWeight(codes, scale, offset, 4)}.get
        with pytest.raises(CorruptModel, match=f"'{name}' holds NaN or infinite numbers"):
            Model(tiny_config(), source, torch.float32, torch.device("cpu"))
    with pytest.raises(CorruptModel, match=f"'{name}' holds NaN or infinite numbers"):
        Model(tiny_config(), Without(name, damaged), torch.float32, torch.device("cpu"))
