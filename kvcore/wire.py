"""Reading msgpack maps from other processes without trusting them.

Every message is one msgpack map with a version field `v`; arrays travel as bytes, little-endian.
"""

from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from kvcore.errors import WireError

T = TypeVar("T")


def pack(version: int, **fields: Any) -> bytes:
    """One message: the fields and the version, as msgpack."""
    return msgpack.packb({"v": version, **fields})


def unpack(data: bytes, version: int) -> dict[str, Any]:
    """The fields of one message. Raises `WireError` for anything but a map of this version."""
    try:
        message = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack message: {error}") from error
    if not isinstance(message, dict):
        raise WireError("not a msgpack map")
    if message.get("v") != version:
        raise WireError(f"message version {message.get('v')!r}, this code reads {version}")
    return message


def take(message: dict[str, Any], key: str, kind: type[T]) -> T:
    """The value of `key`, which must be exactly of the given type; raises `WireError` otherwise."""
    value = message.get(key)
    if type(value) is not kind:
        raise WireError(f"field {key!r} must be {kind.__name__}, got {type(value).__name__}")
    return value


def take_word(message: dict[str, Any], key: str) -> int:
    """An integer of 0..2^64-1."""
    value = take(message, key, int)
    if not 0 <= value < 1 << 64:
        raise WireError(f"field {key!r} is out of range")
    return value


def take_array(message: dict[str, Any], key: str, dtype: str) -> npt.NDArray[Any]:
    """A one-dimensional array of a little-endian dtype such as "<u4", in native byte order, read-only."""
    data = take(message, key, bytes)
    item = np.dtype(dtype)
    if len(data) % item.itemsize:
        raise WireError(f"field {key!r} is no whole number of {item.name}")
    return np.frombuffer(data, dtype=item).astype(item.newbyteorder("="), copy=False)
