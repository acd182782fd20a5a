"""The connections between the ranks of one model, all on one node.

Ranks meet at a store that rank 0 opens on loopback, and connect by gloo, on loopback too: for orders, for
saying that an order was carried out, and on CPUs for the sums in a forward pass, which on CUDA devices are
NCCL's. When a rank's process ends, its connections close, which ends every wait of the others at once; a rank
that hangs costs them their timeout. NCCL notices neither: there, all ranks say that they have launched a pass
before rank 0 waits for its result, and what hangs later ends the process by NCCL's own watchdog.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from replica.errors import EngineDead
from replica.parallel.orders import HEADER_SIZE, Order, drawn_size, payload_size
from replica.parallel.shard import Shard

_LOOPBACK = "127.0.0.1"
_MEETING_TIMEOUT = timedelta(seconds=60)
# An engine may have nothing to do for weeks; that rank 0 has gone, its closed connection tells.
_IDLE = timedelta(days=3650)


def open_store(size: int) -> dist.TCPStore:
    """The place where `size` ranks meet: rank 0's, on a free port of loopback."""
    listener = socket.create_server((_LOOPBACK, 0), backlog=size)
    port = int(listener.getsockname()[1])
    return dist.TCPStore(
        _LOOPBACK,
        port,
        size,
        is_master=True,
        timeout=_MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(port: int, size: int) -> dist.TCPStore:
    """The same place, seen from another rank. Raises `EngineDead` when nobody is there."""
    with _connected("rank 0"):
        return dist.TCPStore(
            _LOOPBACK, port, size, is_master=False, timeout=_MEETING_TIMEOUT, wait_for_workers=False
        )


class Group:
    """One rank's connections to the others; implements `Collectives`. For one thread at a time.

    Every method raises `EngineDead` when another rank has gone, or has not answered for `timeout_s` seconds.
    """

    def __init__(self, store: dist.Store, shard: Shard, device: torch.device, timeout_s: float) -> None:
        self.shard = shard
        timeout = timedelta(seconds=timeout_s)
        self._on = device
        self._token = torch.zeros(1, dtype=torch.int64)
        with _connected("another rank"):
            self._host = _gloo(store, shard, timeout)
            self._device = _nccl(store, shard, timeout) if device.type == "cuda" else self._host

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place where it can be."""
        x = x.contiguous()
        with _connected("another rank"):
            self._device.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """[n, width] of the ranks' columns x[n, at most ceil(width / size)]."""
        rows, size = len(x), self.shard.size
        if not rows:
            return x.new_empty(0, width)
        share = -(-width // size)
        mine = F.pad(x, (0, share - x.shape[1])).contiguous()
        parts = x.new_empty(size * rows, share)
        with _connected("another rank"):
            self._device._allgather_base(parts, mine).wait()
        return parts.view(size, rows, share).transpose(0, 1).reshape(rows, -1)[:, :width]

    def tell(self, order: Order) -> None:
        """Send an order to the other ranks. For rank 0."""
        for part in order.encode():
            if len(part):
                self._broadcast(torch.from_numpy(part))
        if order.drawn is not None:
            self._share(order.drawn)

    def hear(self) -> Order:
        """The next order, however long it takes. For the others."""
        header = torch.empty(HEADER_SIZE, dtype=torch.int64)
        self._broadcast(header, _IDLE)
        payload = torch.empty(payload_size(header.numpy()), dtype=torch.int64)
        if len(payload):
            self._broadcast(payload)
        drawn, size = None, drawn_size(header.numpy())
        if size is not None:
            drawn = self._share(torch.empty(size, dtype=torch.int64, device=self._on))
        return Order.decode(header.numpy(), payload.numpy(), drawn)

    def agree(self) -> None:
        """Return when every rank has come to this call."""
        with _connected("another rank"):
            self._host.allreduce([self._token]).wait()

    def _share(self, x: Tensor) -> Tensor:
        """Rank 0's x on every rank's device, without the host waiting for CUDA devices."""
        if len(x):
            with _connected("another rank"):
                self._device.broadcast([x], dist.BroadcastOptions()).wait()
        return x

    def _broadcast(self, numbers: Tensor, timeout: timedelta | None = None) -> None:
        options = dist.BroadcastOptions()
        if timeout is not None:
            options.timeout = timeout
        with _connected("another rank" if self.shard.rank == 0 else "rank 0"):
            self._host.broadcast([numbers], options).wait()


def _gloo(store: dist.Store, shard: Shard, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _MEETING_TIMEOUT
    options._threads = 1
    group = gloo(dist.PrefixStore("gloo", store), shard.rank, shard.size, options)
    group._set_default_timeout(timeout)
    return group


def _nccl(store: dist.Store, shard: Shard, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), shard.rank, shard.size, options)


@contextmanager
def _connected(peer: str) -> Iterator[None]:
    """torch.distributed raises bare RuntimeErrors, whatever the cause."""
    try:
        yield
    except RuntimeError as error:
        raise EngineDead(f"{peer} has gone or does not answer: {error}") from error
