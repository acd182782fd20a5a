"""Ranks as threads: the real model code with collectives over shared memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from replica.parallel.shard import Shard


class ThreadGroup:
    """`Collectives` between threads of one process."""

    def __init__(self, shard, barrier, board):
        self.shard, self._barrier, self._board = shard, barrier, board

    def _all(self, x):
        self._board[self.shard.rank] = x.clone()
        self._barrier.wait(60)
        everything = [part.clone() for part in self._board]
        self._barrier.wait(60)
        return everything

    def sum(self, x):
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x, width):
        joined = torch.cat(self._all(x), dim=1)
        assert joined.shape[1] == width
        return joined


@pytest.fixture(scope="session")
def on_ranks():
    """Calls work(collectives) on every rank, each in its thread; the results by rank."""

    def run(size, work):
        barrier, board = threading.Barrier(size), [None] * size

        def one(rank):
            try:
                return work(ThreadGroup(Shard(rank, size), barrier, board))
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(size) as pool:
            return [future.result() for future in [pool.submit(one, rank) for rank in range(size)]]

    return run
