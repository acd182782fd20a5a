"""What a forward pass is given: token ids that the device alone knows, and the rows that want logits."""

import numpy as np
import pytest
import torch

from kernels import ops, reference
from replica.batch import ForwardBatch
from replica.pass_inputs import PassInputs, resolved

CPU = torch.device("cpu")


@pytest.fixture
def inputs():
    shape = ops.AttentionShape(2, 16, torch.float32, CPU)
    return PassInputs(reference, {None, 8}, shape, 4)


def batch(*sequences):
    return ForwardBatch.build(sequences, 4)


def test_ids_that_refer_to_what_was_drawn():
    given = batch(([-3], 5, np.array([1, 2]), 1), ([7], 0, np.array([3]), 1), ([-1], 0, np.array([4]), 1))
    ids = torch.from_numpy(given.token_ids)
    assert resolved(ids, given, torch.tensor([11, 12, 13])).tolist() == [13, 7, 11]
    # A row that could not be drawn is -1; nobody reads what comes of it, but it must be a token.
    assert resolved(ids, given, torch.tensor([-1, 12, 13])).tolist() == [13, 7, 0]
    assert resolved(ids, given, None) is ids


def test_decodes_and_chunks_have_plans_of_their_own(inputs):
    decode, chunk = ([7], 5, np.array([1, 2]), 1), ([8, 9], 0, np.array([3]), 1)
    both = inputs.build(batch(decode, chunk), None)
    assert (both.ids.tolist(), both.positions.tolist(), both.slots.tolist()) == (
        [7, 8, 9],
        [5, 0, 1],
        [9, 12, 13],
    )
    assert (both.decodes, both.rows.tolist()) == (1, [0, 2])
    assert both.decode_plans.keys() == both.prefill_plans.keys() == {None, 8}
    assert both.prefill_plans[8].seqs.context_lens == (2,)


def test_all_rows_are_not_picked(inputs):
    alone = inputs.build(batch(([7], 5, np.array([1, 2]), 1)), None)
    assert (alone.rows, alone.prefill_plans) == (None, {})
    silent = inputs.build(batch(([7], 5, np.array([1, 2]), 0)), None)
    assert len(silent.rows) == 0
