"""Rows drawn on the device, rows drawn by the replica's sampler, and both in one batch: the same tokens."""

import numpy as np
import pytest
import torch

from kernels import triton as fast
from replica.draws import DeviceDraws
from replica.request import SamplingParams
from replica.sampler import Row, sample
from replica.staging import Staging

PROMPT = np.array([1, 2, 3], dtype=np.int32)
PLAIN = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": -1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 2**63 - 1},
]
OTHERS = [
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "n": 1, "best_of": 2},
]


def rows(*params):
    return [
        Row(SamplingParams(**given), (1 << 64) - 1 - i, PROMPT, [4] * i, ahead=i % 2 if given in PLAIN else 0)
        for i, given in enumerate(params)
    ]


@pytest.fixture
def begin(device):
    def run(logits, asked):
        return DeviceDraws(logits.to(device), asked, Staging(device), fast.sample)

    return run


def logits(count, seed=0):
    return 3 * torch.randn(count, 300, generator=torch.Generator().manual_seed(seed))


def test_plain_rows_stay_on_the_device(begin, device):
    asked, scores = rows(*PLAIN, *PLAIN), logits(2 * len(PLAIN))
    draws, expected = begin(scores, asked), sample(scores, asked)
    assert (draws.tokens.device.type, draws.tokens.tolist()) == (device.type, expected.tokens)
    assert draws.result() == expected


def test_others_are_brought_over(begin):
    asked, scores = rows(OTHERS[0], *PLAIN[:2], OTHERS[1], PLAIN[2], OTHERS[2]), logits(6, seed=1)
    draws, expected = begin(scores, asked), sample(scores, asked)
    assert draws.tokens is None
    assert draws.result() == expected


def test_no_plain_row_at_all(begin):
    asked, scores = rows(*OTHERS), logits(3, seed=2)
    assert begin(scores, asked).result() == sample(scores, asked)


def test_what_cannot_be_drawn(begin):
    scores = logits(3, seed=3)
    scores[0, 5] = scores[2, 7] = float("nan")
    asked = rows(PLAIN[1], PLAIN[0], OTHERS[0])
    assert begin(scores, asked).result().tokens == [-1, int(scores[1].argmax()), -1]


def test_beams_and_tokens_that_must_not_come_are_no_plain_rows():
    params = SamplingParams()
    assert Row(params, 0, PROMPT).plain
    assert not Row(params, 0, PROMPT, candidates=4).plain
    assert not Row(params, 0, PROMPT, forbidden=frozenset({2})).plain
