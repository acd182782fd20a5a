"""Tokens that are recorded before they are known: their values come before the commit."""

import numpy as np
import pytest

from kvcore.errors import InvalidRequest, StaleLease


def seq(*tokens):
    return np.array(tokens, dtype=np.int32)


@pytest.fixture
def lease(cache, ns):
    """Six tokens computed, three more recorded as zeros: blocks of 4."""
    found = cache.claim(seq(1, 2, 3, 4, 5, 6), ns)
    cache.commit(found, 6)
    cache.append(found, seq(0, 0, 0))
    return found


def test_what_is_published_is_what_was_told(cache, ns, lease):
    cache.settle(lease, 6, seq(7))
    cache.settle(lease, 7, seq(8, 9))
    assert lease.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cache.commit(lease, 9)
    cache.release(lease)
    cache.check()
    assert cache.probe(seq(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), ns) == 8
    assert cache.probe(seq(1, 2, 3, 4, 5, 6, 0, 0, 0, 10), ns) == 6


def test_hashes_that_were_asked_for_too_early_are_forgotten(cache, ns, lease):
    early = lease.hashes.copy()
    cache.settle(lease, 6, seq(7, 8))
    hasher = cache.hasher
    expected = hasher.block_hashes(seq(1, 2, 3, 4, 5, 6, 7, 8), 4, hasher.root(ns))
    assert lease.hashes.tolist() == expected.tolist()
    assert (early[0] == expected[0], early[1] == expected[1]) == (True, False)


@pytest.mark.parametrize(("start", "count"), [(5, 1), (6, 4), (9, 1), (-1, 1)])
def test_only_what_is_recorded_and_not_committed(cache, lease, start, count):
    with pytest.raises(InvalidRequest, match=r"not in 6\.\.9"):
        cache.settle(lease, start, np.zeros(count, dtype=np.int32))
    assert lease.tokens.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0]


def test_not_after_the_release(cache, lease):
    cache.release(lease)
    with pytest.raises(StaleLease):
        cache.settle(lease, 6, seq(7))
