"""Tokenizers: exact round trips, special tokens, threads, and Hugging Face folders."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from replica.errors import ChatTemplateError, CorruptModel, ModelNotFound
from replica.models import load_tokenizer
from replica.tokenizer_build import byte_alphabet, hf_vocabulary

TINY = load_tokenizer("random:tiny")


def test_tiny_ids():
    assert TINY.encode_text("hi").tolist() == [107, 108]
    assert TINY.encode_text("é<|im_end|>").tolist() == [198, 172, 2]
    assert TINY.encode_text("hi", add_bos=True).tolist() == [0, 107, 108]
    assert TINY.encode_text("").dtype == np.int32 and len(TINY.encode_text("")) == 0
    assert TINY.encode_chat([{"role": "user", "content": ""}])[:3].tolist() == [1, 120, 118]
    assert (TINY.vocab_size, TINY.context_length, TINY.eos_ids) == (259, 4096, {0, 2})
    assert len(TINY.model_digest) == 64


@given(st.text())
def test_text_survives(text):
    ids = TINY.encode_text(text)
    assert TINY.decode(ids, skip_special=False) == text
    assert b"".join(TINY.token_bytes(i) for i in ids) == text.encode()


def test_decoding():
    assert TINY.decode([0, 107, 2, 108]) == "hi"
    assert TINY.decode([0, 107, 2], skip_special=False) == "<|endoftext|>h<|im_end|>"
    assert TINY.decode(TINY.encode_text("é")[:1]) == "\ufffd"
    assert TINY.token_bytes(259) == TINY.token_bytes(-1) == b""
    assert TINY.token_bytes(np.int64(107)) == b"h"
    assert TINY.is_special(2) and not TINY.is_special(107)


def test_threads_agree():
    texts = [f"text {i} é" * 50 for i in range(64)]
    alone = [TINY.encode_text(text).tolist() for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: TINY.encode_text(text).tolist(), texts)) == alone


def test_the_byte_alphabet_is_the_libraries():
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert byte_alphabet()["Ġ"] == ord(" ") and byte_alphabet()["a"] == ord("a")


def byte_level_folder(folder, template=None, bos=False):
    vocab = {char: i for i, char in enumerate(sorted(byte_alphabet()))} | {"Ġa": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["naïve"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $0", special_tokens=[("<s>", 257)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_hugging_face_byte_level(tmp_path):
    known = hf_vocabulary(byte_level_folder(tmp_path))
    assert known.token_bytes[256] == b" a" and known.token_bytes[259] == "naïve".encode()
    assert (known.bos_id, known.eos_id, known.eos_ids, known.add_bos) == (257, 258, {258}, False)
    assert known.special_ids == {257, 258}
    assert known.template is None
    assert hf_vocabulary(byte_level_folder(tmp_path, bos=True)).add_bos


def test_hugging_face_ends_and_templates(tmp_path):
    folder = byte_level_folder(tmp_path, template=[{"name": "default", "template": "A"}])
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 7]}')
    (folder / "config.json").write_text('{"eos_token_id": 9}')
    known = hf_vocabulary(folder)
    assert known.eos_ids == {256, 7, 9, 258} and known.template == "A"
    (folder / "chat_template.jinja").write_text("B")
    assert hf_vocabulary(folder).template == "B"


def test_hugging_face_sentencepiece_style(tmp_path):
    vocab = {"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "▁a": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert hf_vocabulary(tmp_path).token_bytes == (b"<unk>", b"\n", b" ", b"a", b" a")


def test_bad_folders(tmp_path):
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        hf_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(CorruptModel, match="is not a tokenizer"):
        hf_vocabulary(tmp_path)


def test_a_model_without_template_says_so(tmp_path):
    config = {
        "model_type": "llama",
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 8),
        **dict.fromkeys(("num_attention_heads", "max_position_embeddings"), 2),
    }
    folder = byte_level_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode_text(" a").tolist() == [256]
    assert tokenizer.context_length == 2
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
