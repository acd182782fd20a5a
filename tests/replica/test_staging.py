"""Arrays on their way to the device: values, shapes, addresses, and how long they last."""

import numpy as np
import torch

from replica.staging import Staging

CPU = torch.device("cpu")


def test_all_arrays_arrive_aligned():
    arrays = [
        np.array([-1, 2**40], dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.empty((0, 2), dtype=np.int32),
        np.array([0.5], dtype=np.float32),
    ]
    sent = Staging(CPU).put(arrays)
    assert [tensor.dtype for tensor in sent] == [torch.int64, torch.int32, torch.int32, torch.float32]
    assert [tuple(tensor.shape) for tensor in sent] == [(2,), (2, 3), (0, 2), (1,)]
    assert [tensor.tolist() for tensor in sent] == [array.tolist() for array in arrays]
    assert {tensor.data_ptr() % 16 for tensor in sent if len(tensor)} == {0}


def test_one_buffer_may_be_filled_while_the_other_is_in_use():
    staging = Staging(CPU)
    (first,) = staging.put([np.arange(5)])
    (second,) = staging.put([np.arange(5, 10)])
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])


def test_buffers_grow():
    staging = Staging(CPU)
    for count in (3, 100_000, 7, 300_000):
        (sent,) = staging.put([np.arange(count)])
        assert sent.tolist() == list(range(count))


def test_nothing_to_send():
    assert Staging(CPU).put([]) == []
