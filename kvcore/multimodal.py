"""Images and sounds in the keys of the cache: their placeholder tokens become tokens that name the content.

A model sees the same placeholder tokens for every image. Here they are replaced by *pseudo tokens*, negative
numbers that no vocabulary has, drawn from the item's digest. So block keys and the comparison of tokens, in
router and replica alike, depend on the whole digest and on the place within the item; text after an item
depends on it as on any prefix. The cache gets the result, the model the original.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcore.arrays import Tokens, as_tokens
from kvcore.errors import InvalidRequest

_MIN_LENGTH = 4  # pseudo tokens of 31 bits: fewer would not carry a digest


@dataclass(frozen=True)
class Media:
    """An item that takes the places offset <= i < offset + length of a prompt.

    `digest` stands for everything that the encoder's output depends on: the content, and how it is cut and
    scaled. Raises `InvalidRequest` for an empty digest, a negative offset, or fewer than 4 places.
    """

    offset: int
    length: int
    digest: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if type(self.digest) is not bytes or not self.digest:
            raise InvalidRequest("the digest of a media item must be bytes, at least one")
        if self.offset < 0 or self.length < _MIN_LENGTH:
            raise InvalidRequest(
                f"a media item has {_MIN_LENGTH} places or more within its prompt, not {self}"
            )


def with_media(tokens: Tokens, items: Sequence[Media]) -> Tokens:
    """A copy of int32[n] in which each item's places hold its pseudo tokens.

    Raises `InvalidRequest` for items that overlap or end after the prompt, and for negative tokens, which
    could pass for pseudo tokens.
    """
    out, free_from = as_tokens(tokens).copy(), 0
    if len(out) and int(out.min()) < 0:
        raise InvalidRequest("tokens of a prompt must not be negative")
    for item in sorted(items, key=lambda item: item.offset):
        end = item.offset + item.length
        if item.offset < free_from or end > len(out):
            raise InvalidRequest(f"media item {item.offset}..{end} overlaps another or the prompt's end")
        out[item.offset : end] = _pseudo_tokens(item)
        free_from = end
    return out


def _pseudo_tokens(item: Media) -> Tokens:
    """int32[length]: SHAKE-256 of length and digest, 31 bits a token, all negative."""
    stream = hashlib.shake_256(b"warmroute.media" + item.length.to_bytes(8, "little") + item.digest)
    words = np.frombuffer(stream.digest(4 * item.length), dtype="<u4")
    return (words | np.uint32(1 << 31)).astype(np.uint32).view(np.int32)
