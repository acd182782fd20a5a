"""The event stream: exact events, gaps, snapshots, the wire."""

import logging

import numpy as np
import pytest

from kvcore.cache import PrefixCache
from kvcore.errors import InvalidRequest
from kvcore.events import BlocksRemoved, BlocksStored, Cleared, EventLog
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def hashes_of(cache, namespace, tokens):
    hasher = cache.hasher
    return hasher.block_hashes(tokens, cache.block_size, hasher.root(namespace)).tolist()


def plain(event):
    """An event as a tuple that can be compared."""
    if isinstance(event, BlocksStored):
        return "stored", event.seq, event.hashes.tolist(), event.parent, event.namespace, event.tier
    if isinstance(event, BlocksRemoved):
        return "removed", event.seq, event.hashes.tolist(), event.reason, event.tier
    return "cleared", event.seq


def test_a_history_in_exact_events(make_cache, ns):
    cache = make_cache(num_blocks=4)
    hashes = hashes_of(cache, ns, span(0, 12))
    lease = cache.claim(span(0, 12), ns)
    cache.commit(lease, 8)
    cache.commit(lease, 12)
    cache.release(lease)
    other = cache.claim(span(50, 62), Namespace("other"))
    cache.release(other)
    cache.clear(ns)
    cache.clear()
    assert [plain(event) for event in cache.events.since(77, 0)] == [
        ("stored", 1, hashes[:2], None, ns.digest(), "device"),
        ("stored", 2, hashes[2:], hashes[1], ns.digest(), "device"),
        ("removed", 3, [hashes[2], hashes[1]], "evicted", "device"),
        ("removed", 4, [hashes[0]], "cleared", "device"),
        ("cleared", 5),
    ]
    assert (cache.epoch, cache.seq) == (77, 5)


def test_hits_duplicates_and_private_sequences_make_no_events(cache, ns, run):
    run(cache, range(8), ns)
    run(cache, range(8), ns)
    run(cache, range(90, 98), ns, publish=False)
    run(cache, range(8), ns, read=False)
    assert cache.seq == 1


def test_events_cannot_be_changed(cache, ns, run):
    run(cache, range(8), ns)
    event = cache.events.since(77, 0)[0]
    with pytest.raises(ValueError):
        event.hashes[0] = 0


def test_raw_salts_are_nowhere_in_stream_explanation_or_log(cache, run, caplog):
    owner = Namespace("m", tenant="tenant-x", salt="hunter2")
    with caplog.at_level(logging.DEBUG):
        run(cache, range(8), owner)
        told = repr([cache.explain(span(0, 9), space) for space in (owner, Namespace("m"))])
        told += repr(cache.stats()) + repr(owner.digest()) + caplog.text
        cache.clear(owner)
    told += repr(cache.events_since(77, 0)) + repr(cache.snapshot())
    assert "hunter2" not in told and "tenant-x" not in told


def test_the_parent_is_the_visible_block_whatever_the_caller_believes(cache, ns, residency):
    """A caller with another secret brings other hashes; the cache goes on with its own."""
    lease = cache.claim(span(0, 8), ns, hashes=np.array([5, 6], dtype=np.uint64))
    cache.commit(lease, 8)
    cache.append(lease, span(8, 12))
    cache.commit(lease, 12)
    own = hashes_of(cache, ns, span(0, 12))[2]
    assert [plain(event)[2:4] for event in cache.events.since(77, 0)] == [([5, 6], None), ([own], 6)]
    follower, now = residency(epoch=77), residency()
    for event in cache.events.since(77, 0):
        follower.apply(event)
    now.load(cache.snapshot())
    assert follower == now


def test_a_gap_is_visible(make_cache, ns, run):
    cache = make_cache(num_blocks=64)
    cache = PrefixCache(64, 4, cache.hasher, events=EventLog(9, capacity=6))
    for start in (0, 100, 200):
        run(cache, range(start, start + 8), ns)
    log = cache.events
    assert [event.seq for event in log.since(9, 1)] == [2, 3]
    assert log.since(9, 3) == []
    assert log.since(9, 0) is None, "event 1 is dropped"
    assert log.since(9, 4) is None, "a number of the future"
    assert log.since(8, 3) is None and log.since(None, 0) is None, "another epoch"


def test_the_log_is_bounded_by_hashes_not_events():
    log = EventLog(1, capacity=100)
    for _ in range(50):
        log.stored(np.arange(9, dtype=np.uint64), None, b"n")
    assert log._weight <= 100 and len(log._events) == 10
    log.removed(np.arange(1000, dtype=np.uint64), "evicted")
    assert log.since(1, 50) is None and log.seq == 51 and len(log._events) == 0
    log.cleared()
    assert [event.seq for event in log.since(1, 51)] == [52]


def test_snapshot_plus_events_equals_events_from_the_start(make_cache, ns, run, residency):
    cache = make_cache(num_blocks=6)
    other = Namespace("m", salt="s")
    run(cache, range(12), ns)
    run(cache, range(8), other)
    middle = cache.snapshot()
    run(cache, [0, 1, 2, 3, 9, 9, 9, 9, 9, 9, 9, 9], ns)
    run(cache, range(70, 78), other)
    cache.clear(ns)
    run(cache, range(12), ns)
    late, full = residency(), residency(epoch=77)
    late.load(middle)
    for follower in (late, full):
        for event in cache.events.since(follower.epoch, follower.seq):
            follower.apply(event)
    now = residency()
    now.load(cache.snapshot())
    assert late == full == now
    assert len(now.blocks) == cache.stats().published
    a, b, c = hashes_of(cache, ns, span(0, 12))
    digest = ns.digest()
    assert {a: (digest, None), b: (digest, a), c: (digest, b)}.items() <= now.blocks.items()


def test_a_follower_refuses_events_out_of_order(residency):
    with pytest.raises(InvalidRequest):
        residency(epoch=1, seq=3).apply(Cleared(5))


def test_age_and_free_share_travel_with_the_events(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=8)
    run(cache, range(8), ns)
    clock.now = 12.5
    batch = cache.events_since(77, 0)
    assert (batch.epoch, batch.seq, batch.eviction_age_s, batch.free_share) == (77, 1, 12.5, 0.75)
    assert [plain(event) for event in batch.events] == [plain(event) for event in cache.events.since(77, 0)]
    assert cache.events_since(78, 0) is None


def test_epochs(make_cache):
    hasher = PrefixHasher(b"s")
    assert PrefixCache(1, 1, hasher).epoch != PrefixCache(1, 1, hasher).epoch
    assert PrefixCache(1, 1, hasher, epoch=5, events=EventLog(5)).epoch == 5
    with pytest.raises(InvalidRequest):
        PrefixCache(1, 1, hasher, epoch=4, events=EventLog(5))
    with pytest.raises(InvalidRequest):
        EventLog(1, capacity=0)
