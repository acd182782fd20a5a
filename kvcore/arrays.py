"""The arrays that pass through this package: their types, and how foreign ones become such arrays."""

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidRequest

BlockIds = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


def as_tokens(tokens: npt.ArrayLike) -> Tokens:
    """int32[n] from any one-dimensional array of integers that fit; raises `InvalidRequest`."""
    array = np.asarray(tokens)
    if array.dtype == np.int32 and array.ndim == 1:
        return plain(array)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise InvalidRequest("tokens must be a one-dimensional array of integers")
    if len(array) and (int(array.min()) < -(1 << 31) or int(array.max()) >= 1 << 31):
        raise InvalidRequest("tokens must fit in 32 bits")
    return array.astype(np.int32)


def plain(array: npt.NDArray) -> npt.NDArray:
    """The array, or a copy that is contiguous, aligned and writable: the kind compiled code is made for."""
    return array if array.flags.carray else array.copy()
