"""GGUF: every supported quantization, the row order of llama.cpp, metadata, and damaged files."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from replica.batch import ForwardBatch
from replica.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from replica.gguf_file import SUPPORTED, GgufFile
from replica.model import Model
from replica.models import load_model, load_tokenizer, model_digest
from replica.random_model import RandomWeights, tiny_config
from replica.weights_gguf import GgufWeights, gguf_config

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<|endoftext|>", "a", "b", "ab", "Ġ", "Ġab", "1", "2", "<|im_end|>"]


def permute(weight, heads):
    """As llama.cpp's converter stores query and key rows of architecture llama."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(path, arch="llama", tensors=(), metadata=(), tokens=TOKENS):
    config = tiny_config()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 2), 3])
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_eos_token_id(len(tokens) - 1)
    for method, value in metadata:
        getattr(writer, method)(value)
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tensors(permuted):
    config = tiny_config()
    weights = RandomWeights(config)
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    layers = {
        f"model.layers.{i}.{a}": f"blk.{i}.{b}" for i in range(config.num_layers) for a, b in NAMES.items()
    }
    for source, target in {**top, **layers}.items():
        array = weights.get(f"{source}.weight").numpy()
        if permuted and target.endswith(("attn_q", "attn_k")):
            array = permute(array, config.num_heads if target.endswith("q") else config.num_kv_heads)
        yield f"{target}.weight", array, Kind.F32


def logits(model):
    model.allocate_kv(4, 16)
    return model.forward(ForwardBatch.build([(np.arange(5, 45), 0, np.array([2, 0, 1]), True)], 16))


@pytest.mark.parametrize("arch, permuted", [("llama", True), ("qwen2", False)])
def test_the_model_in_a_file_is_the_model(tmp_path, arch, permuted):
    path = write(tmp_path / "tiny.gguf", arch, tiny_tensors(permuted))
    loaded, config = load_model(str(path))
    assert config.context_length == 512 and config.arch == arch and config.head_dim == 16
    assert config.digest == model_digest(str(path))
    original = Model(tiny_config(), RandomWeights(tiny_config()), torch.float32, torch.device("cpu"))
    assert torch.equal(logits(loaded), logits(original))


def test_a_file_without_output_ties_the_embedding(tmp_path):
    tensors = [t for t in tiny_tensors(True) if t[0] != "output.weight"]
    loaded, _ = load_model(str(write(tmp_path / "tied.gguf", "llama", tensors)))
    assert logits(loaded).isfinite().all()


def raw_blocks(kind, rows=6, columns=512):
    """Bytes of a quantized tensor: quantized where gguf can, else random with sane scales."""
    rng = np.random.default_rng(int(kind))
    values = rng.normal(size=(rows, columns)).astype(np.float32)
    if kind == Kind.F32:
        return values
    if kind not in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return gguf.quants.quantize(values, kind)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // block, nbytes), dtype=np.uint8)
    scales = rng.normal(size=(rows, columns // block, 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q6_K:
        raw[..., -2:] = scales[..., :2]
    else:
        raw[..., :4] = scales
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
def test_each_quantization(tmp_path, kind):
    raw = raw_blocks(kind)
    file = GgufFile(
        write(tmp_path / "q.gguf", tensors=[("w", raw, kind), ("v", np.ones(3, np.float32), Kind.F32)])
    )
    expected = raw if kind == Kind.F32 else gguf.quants.dequantize(raw.view(np.uint8), kind)
    actual = file.tensor("w")
    assert actual.dtype == np.float32 and actual.shape == (6, 512)
    assert np.isfinite(actual).all() and np.array_equal(actual, expected)
    assert file.tensor("v").tolist() == [1, 1, 1]
    assert file.tensor("absent") is None


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
def test_groups_of_32_are_the_same_weights_unexpanded(tmp_path, kind):
    raw = raw_blocks(kind)
    file = GgufFile(write(tmp_path / "q.gguf", tensors=[("w", raw, kind)]))
    weight = file.grouped("w")
    bits = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4, Kind.Q8_0: 8}.get(kind)
    if bits is None:
        assert weight is None
        return
    assert weight.bits == bits and int(weight.codes.max()) < 2**bits
    assert torch.equal(weight.dense(), torch.from_numpy(file.tensor("w")))
    assert file.grouped("absent") is None


class Expanded:
    """A file's weights without their quantized form."""

    def __init__(self, weights):
        self.get = weights.get


@pytest.mark.parametrize("arch, permuted", [("llama", True), ("qwen2", False)])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
def test_a_quantized_model_answers_like_its_expanded_weights(tmp_path, arch, permuted, kind):
    tensors = [
        (name, gguf.quants.quantize(array, kind), kind) if array.ndim == 2 else (name, array, float32)
        for name, array, float32 in tiny_tensors(permuted)
    ]
    path = write(tmp_path / "tiny.gguf", arch, tensors)
    file = GgufFile(path)
    weights = GgufWeights(file, gguf_config(file))
    exact = logits(Model(gguf_config(file), Expanded(weights), torch.float64, torch.device("cpu")))
    for dtype, relative in ((torch.float32, 1e-5), (torch.float64, 0.0)):
        loaded, _ = load_model(str(path), dtype=dtype)
        assert (logits(loaded) - exact).abs().max() <= relative * exact.abs().max()


def test_q4_1_by_hand(tmp_path):
    """One block: scale 0.5, minimum -3, then nibbles; the low ones are the first half."""
    nibbles = np.arange(32) % 16
    packed = (nibbles[:16] | nibbles[16:][::-1] << 4).astype(np.uint8)
    raw = np.concatenate([np.array([0.5, -3], np.float16).view(np.uint8), packed])[None]
    file = GgufFile(write(tmp_path / "q.gguf", tensors=[("w", raw, Kind.Q4_1)]))
    expected = np.concatenate([nibbles[:16], nibbles[16:][::-1]]) * 0.5 - 3
    assert file.tensor("w")[0].tolist() == expected.tolist()


def test_rope_variants_in_metadata(tmp_path):
    embedding = ("token_embd.weight", np.zeros((9, 64), np.float32), Kind.F32)

    def rope(*metadata, tensors=()):
        path = write(tmp_path / "rope.gguf", tensors=[embedding, *tensors], metadata=metadata)
        return gguf_config(GgufFile(path)).rope

    assert rope().kind == "default"
    linear = rope(("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 4.0))
    assert (linear.kind, linear.factor) == ("linear", 4.0)
    yarn = rope(
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
        ("add_rope_scaling_factor", 2.0),
        ("add_rope_scaling_orig_ctx_len", 256),
    )
    assert (yarn.kind, yarn.factor, yarn.original_context) == ("yarn", 2.0, 256)
    factors = rope(tensors=[("rope_freqs.weight", np.arange(1, 9, dtype=np.float32), Kind.F32)])
    assert (factors.kind, factors.factors) == ("factors", (1, 2, 3, 4, 5, 6, 7, 8))


@pytest.mark.parametrize(
    "arch, metadata, message",
    [
        ("mamba", [], "architecture 'mamba'"),
        ("llama", [("add_expert_count", 8)], "mixture of experts"),
        ("llama", [("add_rope_dimension_count", 8)], "only part of a head"),
        ("llama", [("add_value_length", 8)], "different length"),
        (
            "llama",
            [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE), ("add_rope_scaling_factor", 2.0)],
            "rope",
        ),
    ],
)
def test_unsupported_models(tmp_path, arch, metadata, message):
    embedding = ("token_embd.weight", np.zeros((9, 64), np.float32), Kind.F32)
    path = write(tmp_path / "m.gguf", arch, [embedding], metadata)
    with pytest.raises(UnsupportedModel, match=message):
        gguf_config(GgufFile(path))


def test_unsupported_tensor_type(tmp_path):
    path = write(tmp_path / "m.gguf", tensors=[("w", np.zeros((1, 256 // 256 * 84), np.uint8), Kind.Q2_K)])
    with pytest.raises(UnsupportedModel, match="Q2_K"):
        GgufFile(path).tensor("w")


def test_every_truncation_is_reported(tmp_path):
    whole = write(tmp_path / "whole.gguf", tensors=tiny_tensors(True)).read_bytes()
    cut = tmp_path / "cut.gguf"
    header = whole.index(b"blk.1.ffn_up") + 200
    for length in [1, 3, 4, 8, 20, *range(24, header, 97), len(whole) - 4, len(whole) // 2]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptModel, match=r"cut\.gguf"):
            GgufFile(cut)
    cut.write_bytes(b"")
    with pytest.raises(CorruptModel):
        GgufFile(cut)


def test_damaged_bytes_never_escape_as_foreign_errors(tmp_path):
    whole = bytearray(write(tmp_path / "whole.gguf", tensors=tiny_tensors(True)).read_bytes())
    rng = np.random.default_rng(1)
    header = bytes(whole).index(b"blk.1.ffn_up")
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(0, header, 3):
            damaged[at] = rng.integers(0, 256)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            gguf_config(GgufFile(path))
            load_tokenizer(str(path))
        except ModelError:
            pass


def test_not_gguf_at_all(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("once upon a time there was a file of another kind")
    with pytest.raises(CorruptModel, match="not a GGUF file"):
        load_model(str(path))
    with pytest.raises(ModelNotFound, match="known names are smollm2-135m, random:tiny"):
        load_model("no/such/model")


def test_tokenizer_from_metadata(tmp_path):
    path = write(
        tmp_path / "t.gguf", tensors=tiny_tensors(True), metadata=[("add_chat_template", "{{ eos_token }}")]
    )
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode_text("ab ab12<|im_end|>").tolist() == [3, 5, 6, 7, 8]
    assert tokenizer.decode([3, 5, 6, 7, 8]) == "ab ab12"
    assert tokenizer.eos_ids == {0, 8} and tokenizer.vocab_size == 9 and tokenizer.context_length == 512
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]).tolist() == [8]
    assert tokenizer.model_digest == model_digest(str(path))


@pytest.mark.parametrize(
    "metadata, error, message",
    [
        ([("add_tokenizer_pre", "tekken")], UnsupportedModel, "pre-tokenizer 'tekken'"),
        ([("add_tokenizer_model", "llama")], UnsupportedModel, "only byte-level BPE"),
        ([("add_token_types", [1])], CorruptModel, "9 tokens but 1 token types"),
        ([("add_token_merges", ["a zz"])], CorruptModel, "merges do not fit"),
    ],
)
def test_bad_tokenizers(tmp_path, metadata, error, message):
    class Replacing(gguf.GGUFWriter):
        def add_key_value(self, key, val, vtype, sub_type=None):
            self.kv_data[0].pop(key, None)
            super().add_key_value(key, val, vtype, sub_type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Replacing)
        path = write(tmp_path / "t.gguf", tensors=tiny_tensors(True), metadata=metadata)
    with pytest.raises(error, match=message):
        load_tokenizer(str(path))
