"""Filters, their digest, updates on the wire, and the feed that a router follows."""

import threading

import msgpack
import numpy as np
import pytest

from kvcore.cache import PrefixCache
from kvcore.errors import InvalidRequest, WireError
from kvcore.events import EventLog
from kvcore.fingerprint import (
    CountingFilter,
    FilterGeometry,
    FingerprintFeed,
    FingerprintUpdate,
    column_digest,
)
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace

NS = Namespace("m")


def words(*values):
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize(
    ("blocks", "rows"),
    [(1, 8), (2, 16), (3, 32), (100, 1024), (2000, 16384), (2048, 16384), (100_000, 1 << 20)],
)
def test_geometry_for_a_number_of_blocks(blocks, rows):
    geometry = FilterGeometry.for_blocks(blocks)
    assert (geometry.rows, geometry.hashes) == (rows, 4)
    assert 8 <= rows / blocks < 16


@pytest.mark.parametrize("arguments", [(7,), (12,), (4,), (1 << 32,), (0,), (64, 0), (64, 17)])
def test_wrong_geometries_are_refused(arguments):
    with pytest.raises(InvalidRequest):
        FilterGeometry(*arguments)
    with pytest.raises(InvalidRequest):
        FilterGeometry.for_blocks(0)


def test_rows_follow_the_formula():
    geometry = FilterGeometry(1024, 4)
    keys = words(0, 1, 5 << 32 | 3, 6 << 32 | 3, 2**64 - 1)
    expected = [
        [((key & 0xFFFFFFFF) + k * (key >> 32 | 1)) % 1024 for k in range(4)] for key in keys.tolist()
    ]
    rows = geometry.rows_of(keys)
    assert rows.tolist() == expected and rows.dtype == np.int64
    assert expected[2] == [3, 8, 13, 18] and expected[3] == [3, 10, 17, 24]
    assert geometry.rows_of(words()).shape == (0, 4)


def test_rows_of_a_smaller_filter_are_the_rows_modulo_its_size():
    keys = np.random.default_rng(0).integers(0, 2**64, 100, dtype=np.uint64)
    large, small = FilterGeometry(4096).rows_of(keys), FilterGeometry(64).rows_of(keys)
    assert np.array_equal(large % 64, small)


def finalizer(z):
    mask = (1 << 64) - 1
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def test_digest_follows_the_formula():
    rows = [1, 2, 77, 2**31 - 1]
    expected = sum(finalizer(row) for row in rows) % (1 << 64)
    for dtype in (np.int64, np.uint32, np.uint64):
        assert column_digest(np.array(rows, dtype=dtype)) == expected
    assert column_digest(np.array([], dtype=np.int64)) == 0
    assert column_digest(np.array([1])) == 0x5692161D100B05E5


def test_counting_filter_counts():
    counting = CountingFilter(FilterGeometry(64, 2))
    first, second = words(1 << 32 | 5), words(3 << 32 | 5)  # rows 5, 6 and 5, 8
    assert counting.add(first).tolist() == [5, 6]
    assert counting.add(second).tolist() == [8]
    assert counting.set_rows.tolist() == [5, 6, 8]
    assert counting.digest == column_digest(np.array([5, 6, 8]))
    assert counting.remove(first).tolist() == [6]
    assert np.flatnonzero(counting.bits).tolist() == [5, 8] and counting.bits.shape == (64,)
    assert counting.digest == column_digest(np.array([5, 8]))
    assert counting.clear().tolist() == [5, 8]
    assert counting.digest == 0 and not counting.bits.any()


def test_removing_what_was_never_added_is_refused_and_changes_nothing():
    counting = CountingFilter(FilterGeometry(64, 2))
    counting.add(words(1 << 32 | 5))
    with pytest.raises(InvalidRequest):
        counting.remove(words(1 << 32 | 5, 1 << 32 | 9))
    assert counting.set_rows.tolist() == [5, 6] and counting.digest == column_digest(np.array([5, 6]))


def test_counters_do_not_overflow():
    counting = CountingFilter(FilterGeometry(8, 1))
    same = np.zeros(65_535, dtype=np.uint64)
    counting.add(same)
    with pytest.raises(InvalidRequest):
        counting.add(words(0))
    assert counting.remove(same).tolist() == [0]


def test_false_positives_are_rare():
    geometry = FilterGeometry.for_blocks(2000)
    rng = np.random.default_rng(1)
    counting = CountingFilter(geometry)
    counting.add(rng.integers(0, 2**64, 2000, dtype=np.uint64))
    strangers = geometry.rows_of(rng.integers(0, 2**64, 20_000, dtype=np.uint64))
    assert counting.bits[strangers].all(axis=1).mean() < 0.03


# --- Updates on the wire ---


def update(**changes):
    fields = {
        "epoch": 2**63 + 5,
        "base_seq": 3,
        "seq": 9,
        "geometry": FilterGeometry(64),
        "snapshot": False,
        "set_rows": np.array([1, 63], dtype=np.uint32),
        "digest": 2**64 - 1,
        "cleared_rows": np.array([0, 7, 8], dtype=np.uint32),
    }
    return FingerprintUpdate(**{**fields, **changes})


def same(one, other):
    assert one.set_rows.tolist() == other.set_rows.tolist() and one.set_rows.dtype == np.uint32
    assert one.cleared_rows.tolist() == other.cleared_rows.tolist()
    assert one.geometry == other.geometry and one.snapshot is other.snapshot
    for name in ("epoch", "base_seq", "seq", "digest"):
        assert getattr(one, name) == getattr(other, name)


def test_a_delta_survives_the_wire():
    same(FingerprintUpdate.decode(update().encode()), update())


@pytest.mark.parametrize("rows", [[], [5], list(range(64)), [0, 8, 9, 63]])
def test_a_snapshot_survives_the_wire(rows):
    full = update(
        snapshot=True, set_rows=np.array(rows, dtype=np.uint32), cleared_rows=np.array([], dtype=np.uint32)
    )
    same(FingerprintUpdate.decode(full.encode()), full)


def test_a_full_column_travels_as_a_bitmap():
    rows = np.arange(0, 1 << 16, 2, dtype=np.uint32)
    full = FingerprintUpdate(1, 0, 1, FilterGeometry(1 << 16), True, rows, column_digest(rows))
    assert 8192 < len(full.encode()) < 8192 + 100
    same(FingerprintUpdate.decode(full.encode()), full)


GOOD = msgpack.unpackb(update().encode())


@pytest.mark.parametrize(
    "change",
    [
        {"v": 0},
        {"rows": 65},
        {"rows": "64"},
        {"k": 0},
        {"snap": 1},
        {"snap": True},
        {"epoch": -1},
        {"seq": None},
        {"base": 1.0},
        {"digest": b"1"},
        {"set": b"123"},
        {"set": np.array([64], dtype="<u4").tobytes()},
        {"set": np.array([5, 5], dtype="<u4").tobytes()},
        {"clr": np.array([6, 5], dtype="<u4").tobytes()},
        {"map": b"1234567"},
        {"map": 5},
    ],
)
def test_wrong_updates_are_refused(change):
    FingerprintUpdate.decode(msgpack.packb(GOOD))
    with pytest.raises(WireError):
        FingerprintUpdate.decode(msgpack.packb({**GOOD, **change}))


def test_every_truncation_of_an_update_is_refused():
    data = update().encode()
    for length in range(len(data)):
        with pytest.raises(WireError):
            FingerprintUpdate.decode(data[:length])


# --- The feed ---


class Column:
    """What a router does with updates."""

    def __init__(self):
        self.epoch, self.seq, self.rows = None, 0, set()

    def pull(self, feed):
        got = feed.update_since(self.epoch, self.seq)
        if got is None:
            return None
        rows = set(got.set_rows.tolist())
        if got.snapshot:
            self.rows = rows
        else:
            assert (got.epoch, got.base_seq) == (self.epoch, self.seq)
            self.rows = (self.rows - set(got.cleared_rows.tolist())) | rows
        self.epoch, self.seq = got.epoch, got.seq
        assert got.digest == column_digest(np.array(sorted(self.rows), dtype=np.int64))
        return got


def make(num_blocks=64, capacity=65_536):
    cache = PrefixCache(num_blocks, 4, PrefixHasher(b"s"), events=EventLog(7, capacity))
    geometry = FilterGeometry(4096)
    return cache, FingerprintFeed(cache, geometry), geometry


def live(cache, start, blocks, namespace=NS):
    tokens = np.arange(start, start + 4 * blocks, dtype=np.int32)
    lease = cache.claim(tokens, namespace)
    cache.commit(lease, len(tokens))
    cache.release(lease)
    return tokens


def expected_rows(cache, geometry):
    counting = CountingFilter(geometry)
    counting.add(cache.snapshot().hashes)
    return set(counting.set_rows.tolist())


def test_a_new_router_gets_a_snapshot_then_deltas_then_nothing():
    cache, feed, geometry = make()
    column = Column()
    first = column.pull(feed)
    assert (first.snapshot, first.epoch, first.seq, len(first.set_rows)) == (True, 7, 0, 0)
    assert column.pull(feed) is None
    live(cache, 0, 4)
    delta = column.pull(feed)
    assert (delta.snapshot, delta.base_seq, delta.seq) == (False, 0, 1)
    assert column.rows == expected_rows(cache, geometry)
    assert 12 <= len(delta.set_rows) <= 16 and len(delta.cleared_rows) == 0
    assert column.pull(feed) is None


def test_routers_at_different_numbers_get_the_same_column():
    cache, feed, geometry = make(num_blocks=16)
    early, late = Column(), Column()
    early.pull(feed)
    for step in range(12):
        live(cache, 1000 * step, 3)
        late.pull(feed)
    got = early.pull(feed)
    assert got.snapshot is False and got.base_seq == 0
    assert early.rows == late.rows == expected_rows(cache, geometry)
    assert early.seq == late.seq == cache.seq


def test_changes_that_cancel_still_advance_the_number():
    cache, feed, _ = make()
    column = Column()
    column.pull(feed)
    live(cache, 0, 4)
    cache.clear(NS)
    got = column.pull(feed)
    assert (got.snapshot, got.seq) == (False, 2)
    assert len(got.set_rows) == len(got.cleared_rows) == 0 and column.rows == set()


def test_a_clear_between_stores_is_followed():
    cache, feed, geometry = make()
    column = Column()
    live(cache, 0, 3)
    column.pull(feed)
    live(cache, 100, 2)
    cache.clear()
    live(cache, 0, 1)
    cache.clear()
    live(cache, 200, 2)
    got = column.pull(feed)
    assert got.snapshot is False and column.rows == expected_rows(cache, geometry)


def test_another_epoch_or_an_unknown_number_gets_a_snapshot():
    cache, feed, geometry = make()
    live(cache, 0, 4)
    live(cache, 100, 4)
    for epoch, seq in ((None, 0), (6, 2), (7, 1), (7, 99)):
        got = feed.update_since(epoch, seq)
        assert got.snapshot and set(got.set_rows.tolist()) == expected_rows(cache, geometry)
    assert feed.update_since(7, 2) is None


def test_a_router_beyond_the_history_gets_a_snapshot():
    cache, feed, geometry = make(num_blocks=512)
    old, recent = Column(), Column()
    old.pull(feed)
    for step in range(100):
        live(cache, 1000 * step, 4)
        recent.pull(feed)
    assert old.pull(feed).snapshot is True
    assert old.rows == recent.rows == expected_rows(cache, geometry)


def test_a_feed_slower_than_the_log_rebuilds():
    cache, feed, geometry = make(capacity=8)
    column = Column()
    column.pull(feed)
    for step in range(10):
        live(cache, 1000 * step, 4)
    assert column.pull(feed).snapshot is True
    assert column.rows == expected_rows(cache, geometry) and feed.rebuilds == 1
    live(cache, 0, 4)
    live(cache, 50_000, 2)
    assert column.pull(feed).snapshot is False
    assert column.rows == expected_rows(cache, geometry)


def test_feeds_and_stats_from_other_threads_while_the_cache_works():
    cache, feed, geometry = make(num_blocks=128)
    stop, failures = threading.Event(), []

    def follow():
        column = Column()
        while not stop.is_set():
            try:
                column.pull(feed)
                stats = cache.stats()
                assert stats.free + stats.cached + stats.held == 128
                assert 0 <= cache.probe(np.arange(40, dtype=np.int32), NS) <= 39
                cache.events_since(7, column.seq)
            except Exception as error:  # any failure at all must reach the test
                failures.append(error)
                return

    threads = [threading.Thread(target=follow) for _ in range(2)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(0)
    for _ in range(400):
        start, blocks, salt = (int(rng.integers(low, high)) for low, high in ((0, 50), (1, 30), (0, 3)))
        live(cache, start, blocks, Namespace("m", salt=salt))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    cache.check()
    column = Column()
    column.pull(feed)
    assert column.rows == expected_rows(cache, geometry)
