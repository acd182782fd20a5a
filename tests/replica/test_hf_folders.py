"""Models from Hugging Face folders compute what `transformers` computes, for each relative of Llama."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from replica.batch import ForwardBatch
from replica.errors import CorruptModel, ModelNotFound, UnsupportedModel
from replica.models import load_model, model_digest

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
RELATIVES = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 10}),
    "llama-linear": ("Llama", {"rope": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("Llama", {"rope": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama3": ("Llama", {"rope": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "llama-yarn": ("Llama", {"rope": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": 7, "rms_norm_eps": 1e-5}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
}
IDS = np.arange(41) * 31 % 97


def save(folder, family, settings, **save_options):
    settings = dict(settings)
    rope = {"rope_theta": 5000.0, "rope_type": "default"} | settings.pop("rope", {})
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, "rope_parameters": rope})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(
                    torch.randn_like(parameter) * 0.3
                )  # they begin as 0 and 1, which hides mistakes
    model.save_pretrained(folder, **save_options)
    return model


def compare(folder, model):
    with torch.inference_mode():
        expected = model(torch.from_numpy(IDS)[None]).logits[0]
    ours, _ = load_model(str(folder))
    ours.allocate_kv(32, 4)
    table = np.arange(3, 14)
    ours.forward(ForwardBatch.build([(IDS[:20], 0, table, False)], 4))
    batch = ForwardBatch.build([(IDS[20:40], 20, table, False)], 4)
    middle = ours.forward(ForwardBatch(**{**vars(batch), "logit_rows": np.arange(20)}))
    last = ours.forward(ForwardBatch.build([(IDS[40:], 40, table, True)], 4))
    assert torch.allclose(torch.cat((middle, last)), expected[20:], atol=1e-4)


@pytest.mark.parametrize("relative", RELATIVES)
def test_logits_equal_transformers(relative, tmp_path):
    compare(tmp_path, save(tmp_path, *RELATIVES[relative]))


def test_sharded_weights_and_half_precision(tmp_path):
    model = save(tmp_path, "Llama", {}, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    compare(tmp_path, model)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32).eval()
    compare(tmp_path / "half", half)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(folder, "Llama", {"tie_word_embeddings": False})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_older_rope_keys(folder, saved):
    config = load_model(str(saved))[1]
    edit(folder, rope_parameters=None, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 1.0})
    assert load_model(str(folder))[1].rope.theta == config.rope.theta == 5000.0
    edit(folder, rope_scaling={**LLAMA3, "original_max_position_embeddings": 64})
    assert load_model(str(folder))[1].rope.kind == "llama3"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"quantization_config": {"bits": 4}}, "quantized safetensors"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "only part of a head"),
        ({"num_key_value_heads": 4}, "6 heads do not divide into 4"),
    ],
)
def test_unsupported(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(str(folder))


@pytest.mark.parametrize(
    "changes, message", [({"hidden_size": 0}, "hidden_size = 0"), ({"vocab_size": 5}, "shape")]
)
def test_contradicting_configuration(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(CorruptModel, match=message):
        load_model(str(folder))


def test_damaged_folders(folder):
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    tensors = load(data)
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptModel, match="truncated or damaged"):
        load_model(str(folder))
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, weights)
    with pytest.raises(CorruptModel, match="no lm_head"):
        load_model(str(folder))
    weights.unlink()
    with pytest.raises(ModelNotFound, match="neither model"):
        load_model(str(folder))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CorruptModel, match="outside its folder"):
        load_model(str(folder))
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    with pytest.raises(ModelNotFound, match=r"absent\.safetensors"):
        load_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptModel, match="not readable JSON"):
        load_model(str(folder))


def test_digest_follows_weights_and_configuration(saved, folder):
    original = model_digest(str(saved))
    assert model_digest(str(folder)) == original == load_model(str(folder))[1].digest
    edit(folder, rms_norm_eps=1e-3)
    assert model_digest(str(folder)) != original
