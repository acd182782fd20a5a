"""The feed that a router follows: snapshots, deltas, gaps, other threads."""

import threading

import numpy as np

from kvcore.cache import PrefixCache
from kvcore.events import EventLog
from kvcore.fingerprint import CountingFilter, FilterGeometry, column_digest
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from replica.fingerprint_feed import FingerprintFeed

NS = Namespace("m")


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
