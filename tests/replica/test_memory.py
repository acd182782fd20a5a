"""How many KV blocks fit: the arithmetic, the largest step, and what is said when nothing fits."""

import pytest
import torch

from replica.config import EngineConfig
from replica.errors import ConfigError
from replica.memory import (
    GRAPH_BYTES,
    MOST_BLOCKS,
    Use,
    allocate,
    fitting_blocks,
    largest_batch,
    measured_blocks,
)
from replica.models import load_model
from replica.random_model import tiny_config

GIB, MIB = 1 << 30, 1 << 20


def config(**settings):
    return EngineConfig(**{"max_batch_tokens": 10, "max_num_seqs": 4, "block_size": 2, **settings})


class Ledger:
    """A device on paper: the model takes `step` bytes, which stay taken until they are released."""

    def __init__(self, total, used, step=0, fails_at=None):
        self.total, self.used, self.step, self.fails_at = total, used, step, fails_at
        self.kept, self.held, self.blocks, self.batches = 0, 0, [], []
        self.config = tiny_config()

    def free(self):
        return self.total - self.used - self.kept - self.held

    def release(self):
        self.kept = 0

    def kv_block_bytes(self, block_size):
        return block_size * MIB

    def allocate_kv(self, num_blocks, block_size):
        if self.fails_at == "kv":
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.blocks.append((num_blocks, block_size))
        self.held = 0  # what there was

    def forward(self, batch):
        self.batches.append(batch)
        if self.fails_at == "step":
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.kept = self.step
        return torch.zeros(len(batch.logit_rows), 3)


@pytest.mark.parametrize(
    ("use", "share", "blocks"),
    [
        (Use(100, 100, 0, 0), 1.0, 9),  # one of ten is the model's spare block
        (Use(100, 100, 0, 0), 0.9, 8),
        (Use(100, 70, 0, 0), 0.9, 5),  # 30 in use, whoever uses them
        (Use(100, 70, 15, 5), 0.9, 3),
        (Use(100, 70, 15, 6), 0.9, 2),
        (Use(100, 10, 5, 0), 0.9, -2),
        (Use(10**9, 10**9, 0, 0), 1.0, MOST_BLOCKS),
    ],
)
def test_arithmetic(use, share, blocks):
    assert fitting_blocks(use, share, 10) == blocks


def test_the_largest_batch_has_all_tokens_and_all_rows():
    batch = largest_batch(config(), 4096)
    assert batch.query_lens.tolist() == [3, 3, 2, 2] == batch.context_lens.tolist()
    assert batch.logit_rows.tolist() == [2, 5, 7, 9]
    assert batch.block_tables.tolist() == [[0, 1]] * 4


def test_no_sequence_of_it_is_longer_than_the_context():
    assert largest_batch(config(max_num_seqs=1), 7).positions.tolist() == list(range(7))
    assert largest_batch(config(max_num_seqs=1, max_model_len=5), 7).positions.tolist() == list(range(5))


def test_the_step_is_measured_and_graphs_have_their_room():
    ledger = Ledger(10 * GIB, 2 * GIB, step=GIB)
    # 9 GiB may be used: 2 are, 1 by the step, blocks take 2 MiB.
    assert measured_blocks(config(), ledger, ledger, graphs=False) == 3 * GIB // MIB - 1
    assert (ledger.blocks, ledger.kept) == ([(1, 2), (2, 2)], 0)
    graphs = GIB + 3 * GRAPH_BYTES  # of 1, 2 and 4 sequences
    ledger = Ledger(10 * GIB, 2 * GIB, step=GIB)
    assert measured_blocks(config(), ledger, ledger, graphs=True) == (6 * GIB - graphs) // (2 * MIB) - 1


def test_blocks_of_an_engine_before_this_one_do_not_count():
    ledger = Ledger(10 * GIB, 2 * GIB, step=GIB)
    ledger.held = 7 * GIB
    assert measured_blocks(config(), ledger, ledger, graphs=False) == 3 * GIB // MIB - 1


def test_what_does_not_fit_is_told_with_figures_and_settings():
    ledger = Ledger(10 * GIB, 8 * GIB, step=GIB)
    with pytest.raises(ConfigError) as failure:
        measured_blocks(config(memory_share=0.9), ledger, ledger, graphs=False)
    message = str(failure.value)
    assert (
        "within memory_share 0.9: 10.0 GiB in all, 2.0 GiB free beside the weights, 1.0 GiB for a step"
        in message
    )
    assert "Lower max_batch_tokens (10) or max_num_seqs (4), raise memory_share" in message


def test_a_step_that_runs_out_of_memory_is_a_matter_of_settings():
    ledger = Ledger(10 * GIB, 9 * GIB, fails_at="step")
    with pytest.raises(ConfigError, match=r"max_batch_tokens 10 and max_num_seqs 4 .* 1.0 GiB of 10.0 GiB"):
        measured_blocks(config(), ledger, ledger, graphs=False)


def test_so_are_too_many_blocks():
    ledger = Ledger(10 * GIB, 9 * GIB, fails_at="kv")
    with pytest.raises(ConfigError, match=r"num_blocks 1023 takes 2.0 GiB, and 1.0 GiB of 10.0 GiB are free"):
        allocate(config(), ledger, 1023, lambda: ledger)


def test_a_real_model_is_measured():
    """On paper nothing is taken: the model runs its largest step, and all memory is for blocks."""
    model, _ = load_model("random:tiny")
    ledger = Ledger(MIB, 0)
    assert model.kv_block_bytes(2) == 2 * 2 * 2 * 2 * 16 * 4
    assert measured_blocks(config(memory_share=0.5), model, ledger, graphs=False) == MIB // 2 // 1024 - 1
