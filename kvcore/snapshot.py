"""All that a cache holds at one moment, for followers of its events that have missed some."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.blocks import CACHED
from kvcore.errors import WireError
from kvcore.occupancy import Occupancy
from kvcore.wire import pack, take, take_array, take_word, unpack

_VERSION = 1


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All resident blocks of a cache at sequence number `seq`.

    `hashes` uint64[m]; `parents` int32[m] are indices into `hashes`, -1 at the beginning of a prompt;
    `owners` int32[m] are indices into `namespaces`, a tuple of namespace digests.
    """

    epoch: int
    seq: int
    hashes: npt.NDArray[np.uint64]
    parents: npt.NDArray[np.int32]
    owners: npt.NDArray[np.int32]
    namespaces: tuple[bytes, ...]

    def encode(self) -> bytes:
        """The snapshot as msgpack."""
        return pack(
            _VERSION,
            epoch=self.epoch,
            seq=self.seq,
            h=self.hashes.astype("<u8").tobytes(),
            p=self.parents.astype("<i4").tobytes(),
            o=self.owners.astype("<i4").tobytes(),
            ns=list(self.namespaces),
        )

    @classmethod
    def decode(cls, data: bytes) -> "Snapshot":
        """The snapshot from bytes of another process; raises `WireError` for anything that is not one."""
        message = unpack(data, _VERSION)
        hashes = take_array(message, "h", "<u8")
        parents, owners = take_array(message, "p", "<i4"), take_array(message, "o", "<i4")
        names = tuple(take(message, "ns", list))
        if not len(hashes) == len(parents) == len(owners):
            raise WireError("a snapshot's arrays differ in length")
        if any(type(name) is not bytes for name in names):
            raise WireError("a snapshot's namespaces must be bytes")
        for index, low, high in ((parents, -1, len(hashes)), (owners, 0, len(names))):
            if len(index) and (index.min() < low or index.max() >= high):
                raise WireError("a snapshot's index is out of range")
        seq, epoch = take_word(message, "seq"), take_word(message, "epoch")
        return cls(epoch, seq, hashes, parents, owners, names)


def take_snapshot(state: Occupancy, epoch: int, seq: int) -> Snapshot:
    """All published blocks, as of sequence number `seq`."""
    blocks = state.pool.blocks
    ids = np.flatnonzero(blocks["state"] == CACHED)
    place = np.full(len(blocks) + 1, -1, dtype=np.int32)  # the last one serves every root
    place[ids] = np.arange(len(ids), dtype=np.int32)
    numbers, owners = np.unique(state.owners()[ids], return_inverse=True)
    return Snapshot(
        epoch=epoch,
        seq=seq,
        hashes=blocks["hash"][ids],
        parents=place[np.maximum(blocks["parent"][ids], -1)],
        owners=owners.astype(np.int32),
        namespaces=tuple(state.spaces.digest(number) for number in numbers.tolist()),
    )
