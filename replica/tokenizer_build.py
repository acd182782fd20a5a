"""Vocabularies from where they are kept: GGUF metadata, a Hugging Face folder, or `random:tiny`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from replica.errors import CorruptModel, UnsupportedModel
from replica.gguf_file import GgufFile
from replica.random_model import CHAT_TEMPLATE, SPECIAL_TOKENS
from replica.tokenizer import Vocabulary
from replica.weights_hf import read_json

# GGUF token types.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# Control tokens that end a turn even where the metadata names only one of them (llama.cpp does the same).
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>")

_WORD_PATTERNS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte value: character -> byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def tiny_vocabulary() -> Vocabulary:
    """One token per byte after the special tokens."""
    by_byte = {byte: char for char, byte in byte_alphabet().items()}
    first = len(SPECIAL_TOKENS)
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {by_byte[byte]: first + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return Vocabulary(
        backend=backend,
        template=CHAT_TEMPLATE,
        token_bytes=(*(token.encode() for token in SPECIAL_TOKENS), *(bytes([byte]) for byte in range(256))),
        special_ids=frozenset(range(first)),
        eos_ids=frozenset({0, 2}),
        eos_id=2,
        bos_id=0,
    )


def gguf_vocabulary(file: GgufFile) -> Vocabulary:
    """Byte-level BPE from GGUF metadata (tokenizer.ggml.*), pre-tokenizer as llama.cpp names it."""
    meta = _TokenizerMeta(file)
    if meta.get("model") != "gpt2":
        raise UnsupportedModel(f"{file.path}: tokenizer {meta.get('model')!r}; only byte-level BPE ('gpt2')")
    tokens, merges = meta.strings("tokens"), meta.strings("merges")
    kinds = meta.get("token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CorruptModel(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    pre, ignore_merges, normalizer = _pre_tokenizer(file, meta.get("pre", "default"))
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        pairs = [_pair(merge) for merge in merges]
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    except Exception as error:  # tokenizers raises bare Exception for merges that name unknown tokens
        raise CorruptModel(f"{file.path}: its merges do not fit its tokens: {error}") from error
    backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    added = [
        tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    special = frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL)
    named_ends = {vocab[token] for token in _END_TOKENS if token in vocab and vocab[token] in special}
    found_ends = [meta.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = {end for end in found_ends if isinstance(end, int)}
    return Vocabulary(
        backend=backend,
        template=file.metadata.get("tokenizer.chat_template"),
        token_bytes=_bytes_of(tokens, {i for i, kind in enumerate(kinds) if kind != _NORMAL}),
        special_ids=special,
        eos_ids=frozenset(ends | named_ends),
        eos_id=meta.get("eos_token_id"),
        bos_id=meta.get("bos_token_id"),
        add_bos=bool(meta.get("add_bos_token", False)),
    )


def hf_vocabulary(folder: Path) -> Vocabulary:
    """tokenizer.json with the settings of tokenizer_config.json, generation_config.json and config.json."""
    path = folder / "tokenizer.json"
    raw = read_json(path)
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    except Exception as error:  # tokenizers raises bare Exception for files it cannot read
        raise CorruptModel(f"{path} is not a tokenizer: {error}") from error
    settings = _optional_json(folder / "tokenizer_config.json")
    added = {int(entry["id"]): entry for entry in raw.get("added_tokens", [])}
    tokens = [backend.id_to_token(i) or "" for i in range(backend.get_vocab_size(with_added_tokens=True))]
    bos_id = _id_of(backend, settings.get("bos_token"))
    eos_id = _id_of(backend, settings.get("eos_token"))
    ends = _config_ends(folder) | (set() if eos_id is None else {eos_id})
    return Vocabulary(
        backend=backend,
        template=_hf_template(folder, settings),
        token_bytes=_hf_bytes(raw, tokens, set(added)),
        special_ids=frozenset(i for i, entry in added.items() if entry.get("special")),
        eos_ids=frozenset(ends),
        eos_id=eos_id,
        bos_id=bos_id,
        add_bos=bos_id is not None and backend.encode("").ids[:1] == [bos_id],
    )


class _TokenizerMeta:
    """Values under `tokenizer.ggml.`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{key}", default)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CorruptModel(f"{self._file.path} has no list tokenizer.ggml.{key}")
        return value


def _pair(merge: str) -> tuple[str, str]:
    # A token never holds a plain space (it is written as Ġ), so the first one separates the two.
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(
    file: GgufFile, name: str
) -> tuple[pre_tokenizers.PreTokenizer, bool, normalizers.Normalizer | None]:
    """(splitter, whether whole words in the vocabulary skip merging, normalizer)."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level, False, None
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level]), False, None
    if name in _WORD_PATTERNS:
        split = pre_tokenizers.Split(tokenizers.Regex(_WORD_PATTERNS[name]), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        is_llama = name == "llama-bpe"
        return pre_tokenizers.Sequence([split, plain]), is_llama, None if is_llama else normalizers.NFC()
    known = ", ".join(sorted(["gpt-2", "smollm", *_WORD_PATTERNS]))
    raise UnsupportedModel(f"{file.path}: pre-tokenizer {name!r}; supported: {known}")


def _bytes_of(tokens: list[str], literal: set[int]) -> tuple[bytes, ...]:
    """Byte-level tokens to bytes; `literal` ids and tokens outside the alphabet are their own text."""
    alphabet = byte_alphabet()

    def convert(index: int, token: str) -> bytes:
        if index not in literal and all(char in alphabet for char in token):
            return bytes(alphabet[char] for char in token)
        return token.encode()

    return tuple(convert(index, token) for index, token in enumerate(tokens))


def _hf_bytes(raw: dict[str, Any], tokens: list[str], literal: set[int]) -> tuple[bytes, ...]:
    if "ByteLevel" in _decoder_types(raw.get("decoder")):
        return _bytes_of(tokens, literal)

    def convert(index: int, token: str) -> bytes:
        """SentencePiece style: <0x0A> is a byte, ▁ a space."""
        if index in literal:
            return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    return tuple(convert(index, token) for index, token in enumerate(tokens))


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    nested = [_decoder_types(inner) for inner in decoder.get("decoders", [])]
    return {str(decoder.get("type"))}.union(*nested)


def _hf_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _config_ends(folder: Path) -> set[int]:
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(folder / name).get("eos_token_id")
        ends |= set(value) if isinstance(value, list) else set() if value is None else {int(value)}
    return ends


def _id_of(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
