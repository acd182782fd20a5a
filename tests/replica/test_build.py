"""What an engine is built with where the settings leave it open."""

import pytest
import torch

from replica.build import settled
from replica.config import EngineConfig
from replica.errors import ConfigError

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@NO_GPU
def test_without_a_gpu_everything_is_on_the_cpu(tiny_engine):
    engine = tiny_engine(num_blocks=None)
    assert (engine.config.device, engine.config.dtype, engine.cache.num_blocks) == ("cpu", "float32", 1024)
    assert engine.facts.layout == "float32-b4"


def test_what_is_said_is_done():
    chosen = settled(EngineConfig(device="cpu", dtype="bfloat16"))
    assert (chosen.device, chosen.dtype) == ("cpu", "bfloat16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is none of auto, float16"),
        ({"dtype": 16}, "dtype must be a text, not 16"),
        ({"device": "gpu"}, "device must be auto, cpu, cuda or .* not 'gpu'"),
        ({"device": "cuda:first"}, "not 'cuda:first'"),
        ({"eviction": "newest"}, "eviction 'newest' is none of fifo, lfu, lru, priority, reuse"),
        ({"memory_share": "90%"}, "memory_share must be a number, not '90%'"),
        ({"num_blocks": "many"}, "num_blocks must be a whole number, not 'many'"),
        ({"num_blocks": 12.5}, "num_blocks must be a whole number, not 12.5"),
        ({"tensor_parallel": None}, "tensor_parallel must be a whole number, not None"),
        ({"tensor_parallel": True}, "tensor_parallel must be a whole number, not True"),
        ({"overlap": "on"}, "overlap must be true or false, not 'on'"),
        ({"cuda_graphs": 1}, "cuda_graphs must be true or false, not 1"),
    ],
)
def test_what_does_not_exist_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@NO_GPU
def test_what_is_not_here_is_refused(tiny_engine):
    with pytest.raises(ConfigError, match="'cuda': torch finds no GPU"):
        tiny_engine(device="cuda")
    with pytest.raises(ConfigError, match="cuda_graphs need a GPU"):
        tiny_engine(cuda_graphs=True)


@pytest.mark.parametrize("share", [0, -0.1, 1.01])
def test_a_share_is_a_part(share):
    with pytest.raises(ConfigError, match="memory_share must be above 0 and at most 1"):
        EngineConfig(memory_share=share)
