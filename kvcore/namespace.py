"""Who may share a block with whom.

Every cached block belongs to one namespace. Two requests can hit each other's blocks only if every part of
their namespaces is equal: the model (digest of its weights, so reloaded weights never meet stale blocks), the
layout of its KV cache, the adapter, the tenant and the salt.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from kvcore.errors import InvalidRequest

_PERSON = b"warmroute.ns.v1"


@dataclass(frozen=True)
class Namespace:
    """The parts of a cache key that are not tokens.

    `model` is a digest of the weights, `layout` names the KV layout (dtype, heads, block size ...), and
    `adapter`, `tenant` and `salt` narrow further. `None`, `0` and `""` are three different values, and a salt
    never equals an adapter or tenant of the same text. The salt is a secret of its owner: it is left out of
    `repr`, and only `digest()` leaves the process.

    Raises `InvalidRequest` for a part of another type (`bool` is not accepted as an integer).
    """

    model: str
    layout: str = ""
    adapter: str | None = None
    tenant: str | None = None
    salt: str | int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "layout"):
            if type(getattr(self, name)) is not str:
                raise InvalidRequest(f"namespace {name} must be a string")
        for name in ("adapter", "tenant"):
            if type(getattr(self, name)) not in (str, type(None)):
                raise InvalidRequest(f"namespace {name} must be a string or None")
        if type(self.salt) not in (str, int, type(None)):
            raise InvalidRequest("namespace salt must be a string, an integer or None")

    def digest(self) -> bytes:
        """16 bytes that stand for this namespace everywhere: in block keys, events and logs."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        state = hashlib.blake2b(digest_size=16, person=_PERSON)
        for name in ("model", "layout", "adapter", "tenant", "salt"):
            state.update(_tagged(name, getattr(self, name)))
        return state.digest()


def _tagged(name: str, value: str | int | None) -> bytes:
    """Name, type and length before the value, so that no two lists of parts give the same bytes."""
    if value is None:
        kind, body = b"n", b""
    elif isinstance(value, int):
        kind, body = b"i", str(value).encode()
    else:
        # Lone surrogates reach us from JSON bodies; they must get a key, not an exception.
        kind, body = b"s", value.encode("utf-8", "surrogatepass")
    return name.encode() + b"=" + kind + len(body).to_bytes(8, "little") + body
