"""What an engine is built with where the settings leave it open."""

import math

import pytest
import torch

from replica.assemble import rehearse, settled
from replica.config import EngineConfig
from replica.errors import ConfigError
from replica.models import load_model

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@NO_GPU
def test_without_a_gpu_everything_is_on_the_cpu(tiny_engine):
    engine = tiny_engine(num_blocks=None)
    assert (engine.config.device, engine.config.dtype, engine.cache.num_blocks) == ("cpu", "float32", 1024)
    assert engine.facts.layout == "float32-b4"


@pytest.mark.parametrize(("block_size", "longest"), [(1, 2), (4, 3), (4, 64)])
def test_a_rehearsal_stays_within_the_context(block_size, longest):
    model, _ = load_model("random:tiny")
    model.allocate_kv(-(-longest // block_size), block_size)
    rehearse(model, block_size, longest)
    used = [bool(caches[0].any()) for caches in model.kv_cache.layers[0][0][:, None]]
    assert (used[0], any(used[1:])) == (True, False)


def test_what_is_said_is_done():
    chosen = settled(EngineConfig(device="cpu", dtype="bfloat16"))
    assert (chosen.device, chosen.dtype) == ("cpu", "bfloat16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is none of auto, float16"),
        ({"dtype": 16}, "dtype must be a text, not 16"),
        ({"memory_share": "90%"}, "memory_share must be a number, not '90%'"),
        ({"tensor_parallel": None}, "tensor_parallel must be a whole number, not None"),
        ({"cuda_graphs": 1}, "cuda_graphs must be true or false, not 1"),
        *(
            ({"device": name}, "is none of auto, cpu, cuda, and cuda:0")
            for name in ("gpu", "meta", "mps", "cpu:1")
        ),
        ({"eviction": "random"}, "eviction 'random' is none of lru"),
        ({"overlap": "false"}, "overlap must be true or false, not 'false'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be a whole number, not 2.5"),
        ({"num_blocks": True}, "num_blocks must be a whole number, not True"),
        ({"num_blocks": 2**31}, "num_blocks must be at most 2147483646"),
        ({"num_blocks": 1, "block_size": 1}, "num_blocks 1 of block_size 1 has no room"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, not 0"),
        ({"parallel_timeout_s": math.inf}, "parallel_timeout_s must be above 0 and at most 1e[+]06, not inf"),
        ({"poll_interval_s": -1}, "poll_interval_s must be 0 to"),
    ],
)
def test_what_does_not_exist_or_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@NO_GPU
def test_what_is_not_here_is_refused(tiny_engine):
    with pytest.raises(ConfigError, match="'cuda': torch finds no GPU"):
        tiny_engine(device="cuda")
    with pytest.raises(ConfigError, match="cuda_graphs need a GPU"):
        tiny_engine(cuda_graphs=True)


def test_more_blocks_than_the_machine_has_memory_for(tiny_engine):
    with pytest.raises(
        ConfigError, match=r"num_blocks 1000000000 takes 1907.3 GiB, more than this machine has"
    ):
        tiny_engine(num_blocks=10**9)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, math.nan])
def test_a_share_is_a_part(share):
    with pytest.raises(ConfigError, match="memory_share must be above 0 and at most 1"):
        EngineConfig(memory_share=share)
