"""All that a cache holds at one moment, for followers of its events that have missed some."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.arrays import Hashes
from kvcore.blocks import CACHED
from kvcore.occupancy import Occupancy


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All resident blocks of a cache at sequence number `seq`.

    `hashes` uint64[m]; `parents` int32[m] are indices into `hashes`, -1 at the beginning of a prompt;
    `owners` int32[m] are indices into `namespaces`, a tuple of namespace digests.
    """

    epoch: int
    seq: int
    hashes: Hashes
    parents: npt.NDArray[np.int32]
    owners: npt.NDArray[np.int32]
    namespaces: tuple[bytes, ...]


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
