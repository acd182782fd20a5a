"""Vocabularies from where they are kept: GGUF metadata, a Hugging Face folder, or `random:tiny`."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from replica.random_model import CHAT_TEMPLATE, SPECIAL_TOKENS
from replica.tokenizer import Vocabulary


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
        bos_id=0,
    )
