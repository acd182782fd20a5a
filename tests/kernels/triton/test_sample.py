"""Draws on the device are those of the float64 twin."""

import torch

from kernels import reference
from kernels import triton as fast

ROWS = [  # temperature, top-k, top-p, min-p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (0.7, 50, 0.9, 0.01),
    (2.0, 300, 0.5, 0.1),
    (1e-6, 40, 0.9, 0.0),
    (1.0, 0, 0.8, 0.3),
    (1.0, 1, 0.5, 0.0),
    (1.0, 6000, 0.0, 0.0),
    (1.5, 0, 1.0, 1.0),
    (0.9, 3, 0.999, 0.0),
]


def arguments(rows, device, seed=0):
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    seeds = torch.arange(len(rows)) * -(2**61) + seed
    positions = torch.arange(len(rows)) + 2**33
    parts = (temperature, top_k.int(), top_p.float(), min_p.float(), seeds, positions)
    return [part.to(device) for part in parts]


def logits(count, vocab, device, step=0.0):
    values = 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(count + vocab))
    return ((values / step).round() * step if step else values).to(device)


def test_every_filter(device):
    rows = arguments(ROWS, device)
    for vocab, step in ((700, 0.0), (8300, 0.5), (3, 0.0)):  # whole and half numbers: many ties
        scores = logits(len(ROWS), vocab, device, step)
        assert torch.equal(fast.sample(scores, *rows), reference.sample(scores, *rows))


def test_rows_may_be_slices_and_of_16_bits(device):
    scores = logits(2, 300, device).to(torch.bfloat16)[:, 3:260]
    rows = arguments(ROWS[3:5], device)
    assert torch.equal(fast.sample(scores, *rows), reference.sample(scores, *rows))


def test_greedy_takes_the_lowest_of_equals(device):
    scores = torch.zeros(1, 9000, device=device)
    scores[0, [8200, 77, 8999]] = 1
    assert fast.sample(scores, *arguments(ROWS[:1], device)).tolist() == [77]


def test_what_cannot_be_drawn_from(device):
    scores = logits(4, 70, device)
    scores[0, 3], scores[1, 9], scores[2, :], scores[3, ::2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    rows = arguments([ROWS[1]] * 4, device)
    drawn = fast.sample(scores, *rows).tolist()
    assert drawn[:3] == [-1, -1, -1] and drawn[3] % 2 == 1
    assert drawn == reference.sample(scores, *rows).tolist()


def test_a_draw_depends_on_seed_and_position_alone(device):
    rows = arguments([ROWS[1]] * 12, device)
    scores = logits(1, 64, device).expand(12, -1)
    together = fast.sample(scores, *rows)
    alone = fast.sample(scores[7:8], *(part[7:8] for part in rows))
    assert together[7] == alone[0] and len(set(together.tolist())) > 3


def test_no_rows(device):
    assert fast.sample(torch.zeros(0, 5, device=device), *arguments(ROWS, device)).shape == (0,)
