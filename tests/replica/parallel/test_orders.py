"""Orders travel as flat integers and do on every rank what they did on the first."""

import numpy as np
import torch

from replica.batch import ForwardBatch
from replica.parallel.orders import HEADER_SIZE, Kind, Order, drawn_size, payload_size


def travel(order):
    header, payload = order.encode()
    assert (header.dtype, payload.dtype) == (np.int64, np.int64)
    assert len(header) == HEADER_SIZE
    assert payload_size(header) == len(payload)
    return Order.decode(header, payload)


class Notes:
    """Notes how it was called."""

    def __init__(self):
        self.calls = []

    def allocate_kv(self, *sizes):
        self.calls.append(("allocate", *sizes))

    def copy_blocks(self, copies):
        self.calls.append(("copy", *copies))

    def record_decodes(self, *sizes):
        self.calls.append(("record", *sizes))

    def forward(self, batch, drawn):
        assert drawn is None
        self.calls.append(batch)
        return torch.zeros(1)


def test_a_batch_arrives_as_it_was_sent():
    tables = np.array([7, 8, 9]), np.array([2])
    batch = ForwardBatch.build([([5, 6, 7], 8, tables[0], 2), ([4], 0, tables[1], 0)], block_size=4)
    model = Notes()
    assert travel(Order.forward(batch)).carry_out(model) is not None
    (arrived,) = model.calls
    for name, array in vars(batch).items():
        assert np.array_equal(getattr(arrived, name), array), name
        assert getattr(arrived, name).shape == array.shape, name


def test_a_batch_without_logits_arrives():
    batch = ForwardBatch.build([([5], 0, np.array([1]), 0)], block_size=4)
    model = Notes()
    travel(Order.forward(batch)).carry_out(model)
    assert model.calls[0].logit_rows.shape == (0,)


def test_copies_and_room():
    model = Notes()
    assert travel(Order.copy([(1, 2, 3), (4, 5, 6)])).carry_out(model) is None
    assert travel(Order.copy([])).carry_out(model) is None
    assert travel(Order.allocate(512, 16)).carry_out(model) is None
    assert travel(Order.record(8, 4096)).carry_out(model) is None
    done = [("copy", (1, 2, 3), (4, 5, 6)), ("copy",), ("allocate", 512, 16), ("record", 8, 4096)]
    assert model.calls == done
    assert travel(Order.allocate(1, 2)).kind is Kind.ALLOCATE


def test_what_was_drawn_is_announced_and_comes_another_way():
    batch = ForwardBatch.build([([5], 0, np.array([1]), 0)], block_size=4)
    for drawn, size in ((torch.tensor([7, 8, 9]), 3), (torch.empty(0, dtype=torch.int64), 0), (None, None)):
        order = Order.forward(batch, drawn)
        header, payload = order.encode()
        assert drawn_size(header) == size
        assert Order.decode(header, payload, drawn).drawn is drawn
