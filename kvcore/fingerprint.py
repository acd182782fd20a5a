"""What a replica tells routers about its cache: bit flips of a Bloom filter, with a proof of agreement.

A `FingerprintUpdate` carries either a snapshot (all set rows) or a delta (rows set and cleared since
`base_seq`), and the digest of the whole column as it must be afterwards. A router that cannot apply a delta,
or finds another digest, asks for a snapshot. `replica.fingerprint_feed` makes the updates from a cache.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidRequest, WireError
from kvcore.filters import CountingFilter, FilterGeometry, column_digest
from kvcore.wire import pack, take, take_array, take_word, unpack

__all__ = ["CountingFilter", "FilterGeometry", "FingerprintUpdate", "column_digest"]

_VERSION = 1
_NO_ROWS = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, eq=False)
class FingerprintUpdate:
    """One step of a replica's fingerprint, from sequence number `base_seq` to `seq` of cache epoch `epoch`.

    `set_rows` and `cleared_rows` are uint32[m], distinct and ascending. With `snapshot` the set rows are the
    whole column, nothing is cleared and `base_seq` means nothing. `digest` is `column_digest` of the column
    after the update.
    """

    epoch: int
    base_seq: int
    seq: int
    geometry: FilterGeometry
    snapshot: bool
    set_rows: npt.NDArray[np.uint32]
    digest: int
    cleared_rows: npt.NDArray[np.uint32] = field(default_factory=lambda: _NO_ROWS)

    def encode(self) -> bytes:
        """msgpack of the update; a column with many set rows travels as a bitmap, because it is smaller."""
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "base": self.base_seq,
            "seq": self.seq,
            "rows": self.geometry.rows,
            "k": self.geometry.hashes,
            "snap": self.snapshot,
            "digest": self.digest,
        }
        if self.snapshot and 4 * len(self.set_rows) > self.geometry.rows // 8:
            fields["map"] = _to_bitmap(self.set_rows, self.geometry.rows)
        else:
            fields["set"] = self.set_rows.astype("<u4").tobytes()
            fields["clr"] = self.cleared_rows.astype("<u4").tobytes()
        return pack(_VERSION, **fields)

    @classmethod
    def decode(cls, data: bytes) -> "FingerprintUpdate":
        """The update from bytes of another process. Raises `WireError` for anything that is not one."""
        message = unpack(data, _VERSION)
        try:
            geometry = FilterGeometry(take(message, "rows", int), take(message, "k", int))
        except InvalidRequest as error:
            raise WireError(str(error)) from error
        snapshot = take(message, "snap", bool)
        set_rows, cleared_rows = _read_rows(message, geometry.rows)
        if snapshot and len(cleared_rows):
            raise WireError("a snapshot clears no rows")
        return cls(
            epoch=take_word(message, "epoch"),
            base_seq=take_word(message, "base"),
            seq=take_word(message, "seq"),
            geometry=geometry,
            snapshot=snapshot,
            set_rows=set_rows,
            digest=take_word(message, "digest"),
            cleared_rows=cleared_rows,
        )


def _to_bitmap(rows: npt.NDArray[np.uint32], total: int) -> bytes:
    bits = np.zeros(total, dtype=np.bool_)
    bits[rows] = True
    return np.packbits(bits, bitorder="little").tobytes()


def _read_rows(message: dict[str, Any], total: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Set and cleared rows of a message, from either form, checked against the geometry."""
    if "map" in message:
        packed = take_array(message, "map", "<u1")
        if len(packed) != total // 8:
            raise WireError(f"a bitmap of {total} rows has {total // 8} bytes, not {len(packed)}")
        return np.flatnonzero(np.unpackbits(packed, bitorder="little")).astype(np.uint32), _NO_ROWS
    set_rows, cleared_rows = take_array(message, "set", "<u4"), take_array(message, "clr", "<u4")
    for rows in (set_rows, cleared_rows):
        if len(rows) and (rows[-1] >= total or np.any(rows[1:] <= rows[:-1])):
            raise WireError("rows must be ascending, distinct and inside the filter")
    return set_rows, cleared_rows
