"""The blocks that the prompts of a trace use, as flat arrays: what statistics and simulations work on.

Blocks are named by their whole prefix (`Blocks.keys`), so equal numbers are equal prefixes. Real text and
tokens are cut into full blocks of 16 tokens, text at four bytes a token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.hashing import PrefixHasher
from kvcore.jit import jit
from kvcore.namespace import Namespace
from router.lab.errors import OptionError
from router.lab.record import Request

TEXT_BLOCK_SIZE = 16

_SPACE = Namespace("trace")
_HASHER = PrefixHasher(b"trace")


@dataclass(frozen=True)
class Uses:
    """r requests in the order of time, and the u uses of d distinct blocks that their prompts make.

    `blocks` int32[u] numbers blocks from 0 to d - 1; those of request i are blocks[begins[i]:begins[i + 1]],
    from the head. `lengths` and `answers` int64[r] in tokens, answers -1 where unknown; `times` float64[r] in
    seconds, NaN where unknown; `sessions` int64[r] numbers sessions, -1 for none. `estimated` says that there
    is text, whose tokens are estimated from its bytes.
    """

    blocks: NDArray[np.int32]
    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    answers: NDArray[np.int64]
    times: NDArray[np.float64]
    sessions: NDArray[np.int64]
    size: int
    distinct: int
    estimated: bool

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Uses":
        """From requests in any order; those without a time stay behind the one before them.

        Raises OptionError: there are none, or they have blocks of different sizes.
        """
        table, sessions = _Table(), dict[str, int]()
        parts: list[NDArray[np.int32]] = []
        rows: list[tuple[float, float, int, int, int]] = []  # order, time, length, answer, session
        size, latest, estimated = None, 0.0, False
        for request in requests:
            keys, length, own_size = _keys(request)
            if size not in (None, own_size):
                raise OptionError(f"the trace has blocks of {size} and of {own_size} tokens")
            size, estimated = own_size, estimated or request.num_tokens is None
            parts.append(table.numbers(keys))
            at, session = request.timestamp_s, request.session_id
            latest = latest if at is None else at
            number = -1 if session is None else sessions.setdefault(session, len(sessions))
            answer = -1 if request.max_tokens is None else request.max_tokens
            rows.append((latest, np.nan if at is None else at, length, answer, number))
        if size is None:
            raise OptionError("the trace has no requests")
        order = np.argsort([row[0] for row in rows], kind="stable")
        columns = [np.array(column)[order] for column in zip(*rows, strict=True)]
        begins = np.cumsum([0, *(len(parts[i]) for i in order)])
        blocks = np.concatenate([parts[i] for i in order])
        lengths, answers, numbers = (column.astype(np.int64) for column in columns[2:])
        return cls(blocks, begins, lengths, answers, columns[1], numbers, size, table.count, estimated)


def _keys(request: Request) -> tuple[NDArray[np.uint64], int, int]:
    """Keys of the prompt's blocks, its length in tokens, and the tokens of a block."""
    if request.blocks is not None:
        return request.blocks.keys(), request.blocks.num_tokens, request.blocks.size
    tokens = request.tokens()
    keys = _HASHER.block_hashes(tokens, TEXT_BLOCK_SIZE, _HASHER.root(_SPACE))
    return keys, len(tokens), TEXT_BLOCK_SIZE


class _Table:
    """Numbers keys in the order in which they are first seen."""

    def __init__(self) -> None:
        self.count = 0
        self._reserve(1 << 16)

    def numbers(self, keys: NDArray[np.uint64]) -> NDArray[np.int32]:
        if 2 * (self.count + len(keys)) > len(self._keys):
            known = self._keys[self._numbers >= 0][np.argsort(self._numbers[self._numbers >= 0])]
            self._reserve(1 << int(4 * (self.count + len(keys))).bit_length())
            self.count = _enlist(known, self._keys, self._numbers, np.empty(len(known), np.int32), 0)
        found = np.empty(len(keys), np.int32)
        self.count = _enlist(keys, self._keys, self._numbers, found, self.count)
        return found

    def _reserve(self, slots: int) -> None:
        self._keys = np.zeros(slots, np.uint64)
        self._numbers = np.full(slots, -1, np.int32)


@jit
def _enlist(keys: Any, table: Any, numbers: Any, found: Any, count: int) -> int:
    """Open addressing with linear probing: the number of each key into `found`; returns the new count."""
    mask = len(table) - 1
    for i in range(len(keys)):
        at = np.int64(keys[i] >> np.uint64(1)) & mask
        while numbers[at] >= 0 and table[at] != keys[i]:
            at = (at + 1) & mask
        if numbers[at] < 0:
            table[at] = keys[i]
            numbers[at] = count
            count += 1
        found[i] = numbers[at]
    return count
