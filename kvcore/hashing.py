"""Prefix hashes: one 64-bit key per full block of tokens, each depending on every token before it.

With t the tokens, b the block size and all arithmetic modulo 2^64::

    y[k, j] = (t[k*b + j] + a[j]) * c[j]          a, c: secret constants per place in the block, c odd
    g[k]    = sum_j (y[k, j] xor (y[k, j] >> 29))
    s[k]    = s[k-1] + mix(g[k] + (k + 1) * d)    d: a secret odd constant, so that order counts
    hash[k] = mix(root + s[k])                    root: from the secret and the namespace

`mix` is the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014). The chain is a running sum instead of
a nested hash, so vector units (or one GPU pass) compute a whole prompt at once. Collisions are possible, as
with any 64-bit key: the cache compares tokens before it trusts a key, and a router only loses an estimate.
"""

import hashlib
import logging
import secrets
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvcore.arrays import Hashes, Tokens, as_tokens
from kvcore.errors import InvalidRequest
from kvcore.jit import jit
from kvcore.namespace import Namespace

logger = logging.getLogger(__name__)

_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)
_S27, _S29, _S30, _S31 = (np.uint64(s) for s in (27, 29, 30, 31))


class PrefixHasher:
    """Turns tokens into prefix hashes, keyed with a secret that all parts of one cluster share.

    The same secret gives the same keys in every process. Without one a random secret is drawn: routers and
    replicas then agree only if they are given this hasher's `secret`. `bits` below 64 keeps only the low bits
    of each hash; it exists to force collisions in tests.

    Raises `InvalidRequest` for an empty secret or `bits` outside 1..64.
    """

    def __init__(self, secret: bytes | None = None, bits: int = 64) -> None:
        if secret is not None and len(secret) == 0:
            raise InvalidRequest("the hash secret must not be empty")
        if not 1 <= bits <= 64:
            raise InvalidRequest(f"bits must be 1..64, not {bits}")
        if secret is None:
            secret = secrets.token_bytes(32)
            logger.warning(
                "no hash secret given: drew a random one; routers and replicas need the same secret to agree"
            )
        self.secret = secret
        self.bits = bits
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"warmroute.key").digest()
        self._mask = np.uint64((1 << bits) - 1)
        self._constants = lru_cache(maxsize=16)(self._make_constants)
        self.root_of = lru_cache(maxsize=4096)(self._make_root)  # from `Namespace.digest()`

    def root(self, namespace: Namespace) -> int:
        """Start value of the chains of one namespace: a 64-bit integer, from its digest and the secret."""
        return self.root_of(namespace.digest())

    def block_hashes(self, tokens: Tokens, block_size: int, root: int) -> Hashes:
        """Hashes of all full blocks: int32[n] -> uint64[n // block_size]. A partial tail has no hash."""
        chain = self.chain(block_size, root)
        return chain.extend(tokens[: len(tokens) // block_size * block_size])

    def chain(self, block_size: int, root: int) -> "PrefixChain":
        """A hash chain at its beginning, to be extended block by block."""
        if block_size < 1:
            raise InvalidRequest(f"block_size must be at least 1, not {block_size}")
        return PrefixChain(self._constants(block_size), np.uint64(root), self._mask)

    def _make_root(self, digest: bytes) -> int:
        root = hashlib.blake2b(digest, digest_size=8, key=self._key, person=b"warmroute.root")
        return int.from_bytes(root.digest(), "little")

    def _make_constants(self, block_size: int) -> "_Constants":
        """Secret constants of one block size: a and c as uint64[block_size], d as an integer."""
        seed = hashlib.shake_256(self._key + b"warmroute.block" + block_size.to_bytes(8, "little"))
        words = np.frombuffer(seed.digest(8 * (2 * block_size + 1)), dtype="<u8").astype(np.uint64)
        odd = words | np.uint64(1)
        return words[:block_size], odd[block_size:-1], odd[-1]


_Words = npt.NDArray[np.uint64]
_Constants = tuple[_Words, _Words, np.uint64]


class PrefixChain:
    """The running state of one prefix, so that a growing sequence hashes only its new blocks."""

    def __init__(self, constants: _Constants, root: np.uint64, mask: np.uint64) -> None:
        self._constants = constants
        self._root = root
        self._mask = mask
        self._sum = np.uint64(0)  # s[k-1] of the module docstring
        self._length = 0  # blocks hashed so far

    def copy(self) -> "PrefixChain":
        """The same state, to go on from independently."""
        twin = PrefixChain(self._constants, self._root, self._mask)
        twin._sum, twin._length = self._sum, self._length
        return twin

    def extend(self, tokens: Tokens) -> Hashes:
        """Hash the next full blocks: int32[m * block_size] -> uint64[m].

        Raises `InvalidRequest` when `tokens` is no whole number of blocks.
        """
        size, tokens = len(self._constants[0]), as_tokens(tokens)
        count, rest = divmod(len(tokens), size)
        if rest:
            raise InvalidRequest(f"{len(tokens)} tokens are no whole number of blocks of {size}")
        hashes = np.empty(count, dtype=np.uint64)
        place = np.uint64(self._length + 1)
        self._sum = np.uint64(_extend(tokens, self._constants, place, self._sum, hashes))
        self._length += count
        _finish(hashes, self._root, self._mask)
        return hashes

    def last_below(self, roots: Hashes) -> Hashes:
        """The hash that the last block has in the chains of other roots: uint64[n] -> uint64[n].

        What comes before the root in a hash is the same for all, so a long prefix is hashed once.
        """
        hashes = roots + self._sum
        _finish(hashes, np.uint64(0), self._mask)
        return hashes


@jit
def mix(z: np.uint64) -> np.uint64:
    """Finalizer of splitmix64, a bijection of 64-bit words with 0 -> 0."""
    z = (z ^ (z >> _S30)) * _MUL1
    z = (z ^ (z >> _S27)) * _MUL2
    return z ^ (z >> _S31)


@jit
def _extend(
    tokens: Tokens, constants: _Constants, place: np.uint64, total: np.uint64, sums: Hashes
) -> np.uint64:
    """Write s of the module docstring for the next blocks; returns the last one (or `total` for none)."""
    add, mul, step = constants
    size = len(add)
    for k in range(len(sums)):
        content = np.uint64(0)
        for j in range(size):
            y = (np.uint64(tokens[k * size + j]) + add[j]) * mul[j]
            content += y ^ (y >> _S29)
        total += mix(content + place * step)
        place += np.uint64(1)
        sums[k] = total
    return total


@jit
def _finish(sums: Hashes, root: np.uint64, mask: np.uint64) -> None:
    """From running sums to hashes, in place."""
    for k in range(len(sums)):
        sums[k] = mix(sums[k] + root) & mask
