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
import numpy.typing as npt

from kvcore.errors import InvalidRequest
from kvcore.hashing import as_tokens

_MIN_LENGTH = 4  # pseudo tokens of 31 bits: fewer would not carry a digest
_WORDS = 16  # pseudo tokens from one call of blake2b


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


def with_media(tokens: npt.NDArray[np.int32], items: Sequence[Media]) -> npt.NDArray[np.int32]:
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


def _pseudo_tokens(item: Media) -> npt.NDArray[np.int32]:
    """int32[length]: blake2b of digest, length and a counter, 31 bits a token, all negative."""
    seed = hashlib.blake2b(item.digest + item.length.to_bytes(8, "little"), person=b"warmroute.media")
    parts = []
    for count in range(-(-item.length // _WORDS)):
        state = seed.copy()
        state.update(count.to_bytes(8, "little"))
        parts.append(state.digest())
    words = np.frombuffer(b"".join(parts), dtype="<u4")[: item.length]
    return (words | np.uint32(1 << 31)).astype(np.uint32).view(np.int32)
