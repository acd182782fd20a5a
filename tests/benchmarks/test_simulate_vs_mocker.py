"""The comparison with Dynamo's mocker, as far as it needs no Dynamo: its timing and the trace it writes."""

import importlib.util
import io
import json
from pathlib import Path

import pytest

from router.lab.blocks import Blocks
from router.lab.record import Request

SOURCE = Path(__file__).parents[2] / "benchmarks" / "simulate_vs_mocker.py"


@pytest.fixture(scope="module")
def side_by_side():
    spec = importlib.util.spec_from_file_location("simulate_vs_mocker", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def timing(side_by_side):
    engine = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "num_gpu_blocks": 10, "block_size": 100}
    return side_by_side.mocker_timing(engine)


def test_a_step_takes_what_the_mockers_polynomials_say(timing):
    assert timing.decode(0, 0) == pytest.approx(5.74e-3)
    assert timing.decode(2, 500) == pytest.approx((5.74 + 54.01 / 2 - 25.74 / 4) / 1000)
    prefill = (16.50142 + 15.18344 + 0.4209989) / 1000
    assert timing.prefill(1000, 0, 2, 500) == pytest.approx(prefill + timing.decode(2, 500))


@pytest.mark.parametrize("rows,context,steps", [(1, 10, 5), (3, 900, 80), (3, 1000, 4), (4, 1200, 2)])
def test_many_decode_steps_take_as_long_as_one_by_one(timing, rows, context, steps):
    alone = sum(timing.decode(rows, context + rows * step) for step in range(steps))
    assert timing.decode(rows, context, steps) == pytest.approx(alone)


def test_a_full_cache_is_as_slow_as_it_gets(timing):
    assert timing.decode(3, 5000) == pytest.approx((5.74 + 54.01 - 25.74) / 1000)


def test_the_mocker_reads_the_arrivals_that_we_simulate(side_by_side):
    shared, own = Blocks.of([7, 8], 4, 8, own=1), Blocks.of([7], 4, 7, own=2)
    requests = [
        Request(blocks=shared, max_tokens=3, timestamp_s=0.0),
        Request(blocks=own, timestamp_s=0.0015),
    ]
    file = io.StringIO()
    side_by_side.write(requests, file)
    assert [json.loads(line) for line in file.getvalue().splitlines()] == [
        {"timestamp": 0.0, "input_length": 8, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 1.5, "input_length": 7, "output_length": 1, "hash_ids": [0, 2]},
    ]
