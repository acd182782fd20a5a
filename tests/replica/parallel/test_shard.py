"""Each rank holds its part of the model, and the parts together compute what the whole computes."""

import re
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from kernels.grouped import GroupedWeight
from replica.batch import ForwardBatch
from replica.errors import ConfigError, CorruptModel
from replica.model import Model
from replica.models import load_model
from replica.parallel.shard import Shard, check_split
from replica.random_model import tiny_config
from replica.weights_hf import HfWeights, hf_config
from tests.replica.test_gguf_files import tiny_tensors, write
from tests.replica.test_hf_folders import IDS, RELATIVES, save

CPU = torch.device("cpu")
TINY = tiny_config()


def forward(model, ids=IDS):
    """Logits after a prefill of two chunks and a decode, through scattered blocks."""
    model.allocate_kv(32, 4)
    table = np.array([5, 3, 9, 30, 1, 2, 7, 8, 11, 10, 12, 13])
    first = model.forward(ForwardBatch.build([(ids[:20], 0, table, 1)], 4))
    second = model.forward(ForwardBatch.build([(ids[20:40], 20, table, 3)], 4))
    return torch.cat((first, second, model.forward(ForwardBatch.build([(ids[40:41], 40, table, 1)], 4))))


def agree(on_ranks, size, path, atol=2e-5, **options):
    whole = forward(load_model(str(path), **options)[0])
    each = on_ranks(size, lambda others: forward(load_model(str(path), others=others, **options)[0]))
    assert all(torch.equal(rank, each[0]) for rank in each)
    assert torch.allclose(each[0], whole, atol=atol, rtol=0)
    return each[0], whole


def test_what_each_rank_holds():
    config = replace(TINY, num_heads=8, num_kv_heads=2, head_dim=4, intermediate_size=12, vocab_size=259)
    held = [
        (s.heads(config), s.kv_heads(config), s.inner(config), s.vocabulary(config))
        for s in (Shard(rank, 4) for rank in range(4))
    ]
    assert held == [
        (slice(0, 8), slice(0, 4), slice(0, 3), slice(0, 65)),
        (slice(8, 16), slice(0, 4), slice(3, 6), slice(65, 130)),
        (slice(16, 24), slice(4, 8), slice(6, 9), slice(130, 195)),
        (slice(24, 32), slice(4, 8), slice(9, 12), slice(195, 259)),
    ]
    local = Shard(3, 4).local(config)
    assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (2, 1, 3)
    assert (local.hidden_size, local.head_dim, local.vocab_size) == (64, 4, 259)
    assert Shard().local(config) == config


@pytest.mark.parametrize(
    "changes, size, message",
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "tensor_parallel 2 does not divide .* 9 attention heads"),
        ({"num_heads": 12, "num_kv_heads": 2}, 3, "tensor_parallel 3 neither divides .* 2 KV heads"),
        ({"num_heads": 12, "num_kv_heads": 4}, 6, "tensor_parallel 6 neither divides .* 4 KV heads"),
        ({"intermediate_size": 129}, 2, "tensor_parallel 2 does not divide the model's MLP, 129 wide"),
        ({"vocab_size": 5}, 4, "tensor_parallel 4 is too much for a vocabulary of 5"),
    ],
)
def test_models_that_cannot_be_spread(changes, size, message):
    with pytest.raises(ConfigError, match=message):
        check_split(replace(TINY, **changes), size)


@pytest.mark.parametrize(
    "changes, size",
    [({}, 1), ({}, 2), ({}, 4), ({"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 9}, 3)],
)
def test_models_that_can_be_spread(changes, size):
    check_split(replace(TINY, **changes), size)


@pytest.mark.parametrize("size", [2, 4])
def test_the_random_model(on_ranks, size):
    agree(on_ranks, size, "random:tiny")


def test_the_random_model_exactly(on_ranks):
    """In float64 nothing but the order of sums differs."""
    agree(on_ranks, 2, "random:tiny", dtype=torch.float64, atol=1e-12)


@pytest.mark.parametrize("relative", RELATIVES)
def test_every_relative_of_llama(on_ranks, relative, tmp_path):
    save(tmp_path, *RELATIVES[relative])
    agree(on_ranks, 2, tmp_path)


def test_more_ranks_than_kv_heads(on_ranks, tmp_path):
    save(tmp_path, "Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12})
    agree(on_ranks, 4, tmp_path)


class Watched(HfWeights):
    """Counts the numbers read in parts, and notes what is read whole."""

    def __init__(self, folder):
        super().__init__(folder)
        self.numbers, self.whole = 0, set()

    def get(self, name):
        found = super().get(name)
        if found is not None:
            self.whole.add(re.sub(r"^model\.layers\.\d+\.", "", name))
        return found

    def part(self, name, part):
        found = super().part(name, part)
        self.numbers += found.numel()
        return found


def test_a_rank_reads_only_its_part_of_the_matrices(tmp_path, on_ranks):
    save(tmp_path, "Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True})

    def read(others):
        weights = Watched(tmp_path)
        Model(hf_config(tmp_path), weights, torch.float32, CPU, others)
        return weights

    first, second = on_ranks(2, read)
    # 3 query, 1 key and 1 value heads of 8, the output's inputs, half of an MLP 80 wide; 3 layers
    layers = 3 * (40 * (48 + 1) + 48 * 24 + 2 * 40 * (48 + 1) + 48 * 40)
    assert (first.numbers, second.numbers) == (layers + 49 * 48, layers + 48 * 48)
    biases = {"self_attn.o_proj.bias", "mlp.down_proj.bias"}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert first.whole == second.whole == {"model.embed_tokens.weight", "model.norm.weight"} | biases | norms


def test_a_misshapen_tensor_is_found_though_only_a_part_is_read(tmp_path, on_ranks):
    save(tmp_path, "Llama", {"tie_word_embeddings": False})
    config = replace(hf_config(tmp_path), intermediate_size=40)
    with pytest.raises(CorruptModel, match=r"gate_proj.*\(80, 48\).*\(40, 48\)"):
        on_ranks(2, lambda others: Model(config, HfWeights(tmp_path), torch.float32, CPU, others))


def quantized(kind):
    """The tiny model's tensors, matrices of the layers quantized."""
    for name, array, plain in tiny_tensors(True):
        if name.startswith("blk") and array.ndim == 2:
            yield name, gguf.quants.quantize(array, kind), kind
        else:
            yield name, array, plain


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0])
def test_quantized_files(on_ranks, tmp_path, kind):
    agree(on_ranks, 2, write(tmp_path / "tiny.gguf", "llama", quantized(kind)))


def test_dense_files(on_ranks, tmp_path):
    agree(on_ranks, 4, write(tmp_path / "tiny.gguf", "llama", tiny_tensors(True)))


def test_a_cut_inside_a_quantization_group_is_refused(on_ranks, tmp_path):
    # 4 ranks with 16 of the 64 inputs of the output projection each
    path = write(tmp_path / "tiny.gguf", "llama", quantized(gguf.GGMLQuantizationType.Q8_0))
    with pytest.raises(ConfigError, match=r"tensor_parallel 4 would cut .*o_proj.* groups of 32"):
        on_ranks(4, lambda others: load_model(str(path), others=others))


def test_parts_of_a_quantized_matrix():
    codes = torch.arange(4 * 96, dtype=torch.uint8).view(4, 96)
    scale, offset = torch.rand(4, 3), torch.rand(4, 3)
    whole = GroupedWeight(codes, scale, offset, 8)
    part = whole.part(slice(1, 3), slice(32, 96))
    assert torch.equal(part.dense(), whole.dense()[1:3, 32:])
    assert part.codes.untyped_storage().nbytes() == 2 * 64
    assert torch.equal(whole.part(slice(2, 4), slice(None)).dense(), whole.dense()[2:])


def test_a_rank_has_the_kv_of_its_own_heads(on_ranks):
    for model, config in on_ranks(2, lambda others: load_model("random:tiny", others=others)):
        model.allocate_kv(8, 4)
        assert model.kv_cache.layers[0][0].shape[1:] == (4, 1, 16)
        assert (model.config.num_heads, config.num_heads) == (2, 4)
