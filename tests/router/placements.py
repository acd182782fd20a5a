"""Placements for tests, and what replicas tell them."""

import random

import numpy as np

from kvcore.fingerprint import FilterGeometry, FingerprintUpdate, column_digest
from router.placement import Placement

GEOMETRY = FilterGeometry(1 << 14)
NONE = np.empty(0, dtype=np.uint64)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def placement_of(count=3, policy="cache_aware", seed=0, **settings):
    clock = Clock()
    placement = Placement(policy, block_size=16, clock=clock, rng=random.Random(seed), **settings)
    for i in range(count):
        placement.join(f"r{i}")
    placement.test_clock = clock
    return placement


def prompt(blocks, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 64, blocks, dtype=np.uint64)


def snapshot(hashes, seq=1, epoch=1):
    rows = np.unique(GEOMETRY.rows_of(hashes)).astype(np.uint32)
    return FingerprintUpdate(epoch, 0, seq, GEOMETRY, True, rows, column_digest(rows))


def load(**fields):
    return {
        "waiting": 0, "running": 0, "waiting_tokens": 0, "free": 0, "cached": 100, "held": 0,
        "num_blocks": 100,
        "eviction_age_s": 10.0, "prefill_tokens_per_s": 1000.0, "decode_step_s": 0.01, **fields,
    }  # fmt: skip


def chunk(replica, cached, epoch=1, seq=1):
    return {"type": "start", "replica": replica, "cached_tokens": cached, "epoch": epoch, "seq": seq}
