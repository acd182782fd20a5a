"""Forks and truncation, as beams and speculative decoding use them: exact blocks, copies and counts."""

import numpy as np
import pytest

from kvcore.errors import InvalidRequest, OutOfBlocks, StaleLease
from kvcore.lease import BlockCopy


def seq(*tokens):
    return np.array(tokens, dtype=np.int32)


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def figures(cache):
    stats = cache.stats()
    return stats.free, stats.cached, stats.held


def refs(cache):
    return cache._state.pool.blocks["refs"].tolist()


@pytest.fixture
def begun(cache, ns):
    """A sequence of six computed tokens in blocks 0 (full, visible) and 1 (half full, private)."""
    lease = cache.claim(span(0, 6), ns)
    cache.commit(lease, 6)
    return lease


# --- Forks ---


def test_a_fork_shares_all_blocks_and_takes_none(cache, begun):
    fork = cache.fork(begun)
    assert (fork.blocks.tolist(), fork.tokens.tolist()) == ([0, 1], [0, 1, 2, 3, 4, 5])
    assert (fork.computed, fork.published, fork.cached_tokens, fork.copy) == (6, 1, 0, None)
    assert refs(cache) == [2, 2, 0, 0, 0, 0, 0, 0] and figures(cache) == (6, 0, 2)
    assert (cache.stats().forks, cache.stats().leases, cache.stats().claims) == (1, 2, 1)
    cache.check()


def test_who_writes_first_gets_a_copy_and_the_last_one_writes_in_place(cache, begun):
    fork = cache.fork(begun)
    cache.append(begun, seq(6))
    assert begun.copy == BlockCopy(src=1, dst=2, num_tokens=2)
    assert begun.blocks.tolist() == [0, 2] and refs(cache)[:3] == [2, 2, 1]
    cache.check()
    cache.commit(begun, 7)
    assert begun.copy is None and refs(cache)[:3] == [2, 1, 1]
    cache.append(fork, seq(9, 9))
    assert fork.copy is None and fork.blocks.tolist() == [0, 1]
    cache.check()


def test_a_block_to_be_copied_is_not_written_to_before(cache, begun):
    fork = cache.fork(begun)
    cache.append(begun, seq(6))
    cache.append(fork, seq(9))  # block 1 is still to be read for the copy
    assert fork.copy == BlockCopy(src=1, dst=3, num_tokens=2)
    assert refs(cache)[:4] == [2, 2, 1, 1]
    cache.commit(begun, 7)
    cache.commit(fork, 7)
    assert refs(cache)[:4] == [2, 0, 1, 1] and figures(cache) == (5, 0, 3)
    cache.check()


def test_the_copy_comes_on_top_of_the_blocks_that_the_tokens_need(cache, begun):
    cache.fork(begun)
    cache.append(begun, span(6, 13))
    assert begun.copy == BlockCopy(src=1, dst=2, num_tokens=2)
    assert begun.blocks.tolist() == [0, 2, 3, 4]
    cache.check()


def test_a_fork_at_the_end_of_a_block_copies_nothing(cache, ns):
    lease = cache.claim(span(0, 8), ns)
    cache.commit(lease, 8)
    fork = cache.fork(lease)
    cache.append(lease, seq(8))
    cache.append(fork, seq(9))
    assert (lease.blocks.tolist(), fork.blocks.tolist()) == ([0, 1, 2], [0, 1, 3])
    assert lease.copy is fork.copy is None


def test_a_fork_has_the_computed_tokens_only(cache, ns):
    lease = cache.claim(span(0, 12), ns)
    assert len(cache.fork(lease)) == 0
    cache.commit(lease, 5)
    fork = cache.fork(lease)
    assert fork.tokens.tolist() == [0, 1, 2, 3, 4] and fork.blocks.tolist() == [0, 1]
    cache.append(fork, seq(7, 7, 7))
    assert fork.copy == BlockCopy(src=1, dst=3, num_tokens=1), "the first one will write there"
    cache.check()


def test_freeing_one_branch_leaves_the_others(cache, ns, begun):
    forks = [cache.fork(begun) for _ in range(3)]
    for number, fork in enumerate(forks):
        cache.append(fork, seq(10 + number, 20))
        cache.commit(fork, 8)
    assert [fork.blocks.tolist() for fork in forks] == [[0, 2], [0, 3], [0, 4]]
    assert refs(cache)[:5] == [4, 1, 1, 1, 1]
    cache.release(begun)
    cache.release(forks[1])
    assert refs(cache)[:5] == [2, 0, 1, 0, 1] and figures(cache) == (4, 1, 3)
    ends = [cache.probe(seq(0, 1, 2, 3, 4, 5, 10 + number, 20, 0), ns) for number in range(3)]
    assert ends == [8, 8, 8], "all three are published"
    cache.check()


def test_beams_that_converge_share_again(cache, ns, begun):
    beams = [begun, cache.fork(begun), cache.fork(begun)]
    for beam in beams:
        cache.append(beam, seq(6, 7))
    assert [beam.blocks.tolist() for beam in beams] == [[0, 2], [0, 3], [0, 4]]
    for beam in beams:
        cache.commit(beam, 8)
    assert [beam.blocks.tolist() for beam in beams] == [[0, 2]] * 3
    assert refs(cache) == [3, 0, 3, 0, 0, 0, 0, 0] and figures(cache) == (6, 0, 2)
    assert cache.stats().deduplicated == 2 and cache.probe(span(0, 9), ns) == 8
    for beam, left in zip(beams, (2, 1, 0), strict=True):
        cache.release(beam)
        assert refs(cache)[:3] == [left, 0, left]
    assert figures(cache) == (6, 2, 0)
    cache.check()


def test_a_fork_needs_no_free_block_and_its_append_fails_cleanly(make_cache, ns):
    cache = make_cache(num_blocks=2)
    lease = cache.claim(span(0, 6), ns)
    cache.commit(lease, 6)
    fork = cache.fork(lease)
    with pytest.raises(OutOfBlocks) as error:
        cache.append(fork, seq(9))
    assert (error.value.needed, error.value.available) == (1, 0)
    assert len(fork) == 6 and fork.copy is None and refs(cache) == [2, 2]
    cache.release(lease)
    cache.append(fork, seq(9))
    assert fork.blocks.tolist() == [0, 1] and fork.copy is None
    cache.check()


def test_a_fork_outlives_its_first_and_a_clear(cache, ns, begun):
    fork = cache.fork(begun)
    cache.release(begun)
    assert cache.clear(ns) == 1
    cache.append(fork, seq(6, 7))
    cache.commit(fork, 8)
    assert cache.probe(span(0, 9), ns) == 0, "claimed before the clear"
    cache.release(fork)
    assert figures(cache) == (8, 0, 0) and len(cache._state.spaces) == 0


def test_forks_grow_the_right_keys(cache, ns, begun):
    fork = cache.fork(begun)
    cache.append(fork, span(6, 17))
    cache.commit(fork, 17)
    assert cache.probe(span(0, 18), ns) == 16
    root = cache.hasher.root(ns)
    assert fork.hashes.tolist() == cache.hasher.block_hashes(span(0, 17), 4, root).tolist()


def test_what_cannot_be_forked(cache, ns, begun):
    cache.fork(begun)
    cache.append(begun, seq(6))
    with pytest.raises(InvalidRequest, match="copy"):
        cache.fork(begun)
    cache.release(begun)
    with pytest.raises(StaleLease):
        cache.fork(begun)
    cache.check()


def test_a_private_sequence_has_private_forks(cache, ns):
    lease = cache.claim(span(0, 6), ns, publish=False)
    cache.commit(lease, 6)
    fork = cache.fork(lease)
    cache.append(fork, seq(6, 7))
    cache.commit(fork, 8)
    assert cache.probe(span(0, 9), ns) == 0 and cache.seq == 0


# --- Truncation ---


def test_rejected_drafts_give_their_blocks_back_and_are_never_visible(cache, ns):
    lease = cache.claim(span(0, 7), ns)
    cache.commit(lease, 7)
    cache.append(lease, span(7, 13))  # one token and five drafts, computed together
    assert lease.blocks.tolist() == [0, 1, 2, 3]
    cache.truncate(lease, 9)  # one draft was right
    assert lease.blocks.tolist() == [0, 1, 2] and figures(cache) == (5, 0, 3)
    cache.commit(lease, 9)
    assert cache.probe(span(0, 14), ns) == 8
    cache.append(lease, seq(50, 51, 52))
    cache.commit(lease, 12)
    assert cache.probe(seq(*range(9), 50, 51, 52, 0), ns) == 12
    assert cache.probe(span(0, 14), ns) == 9, "and what is common is copied"
    cache.check()


@pytest.mark.parametrize(
    ("length", "blocks", "computed", "published"),
    [(12, [0, 1, 2], 9, 2), (9, [0, 1, 2], 9, 2), (8, [0, 1], 8, 2), (7, [0, 1], 7, 1), (1, [0], 1, 0)],
)
def test_what_is_left(cache, ns, length, blocks, computed, published):
    lease = cache.claim(span(0, 12), ns)
    cache.commit(lease, 9)
    cache.truncate(lease, length)
    assert (lease.blocks.tolist(), lease.computed, lease.published) == (blocks, computed, published)
    assert lease.tokens.tolist() == list(range(length))
    assert cache.probe(span(0, 13), ns) == 8, "what is published stays so"
    cache.check()


def test_going_on_inside_a_published_block_needs_a_copy(cache, ns):
    lease = cache.claim(span(0, 8), ns)
    cache.commit(lease, 8)
    cache.truncate(lease, 3)
    assert figures(cache) == (6, 1, 1)
    cache.append(lease, seq(9))
    assert lease.copy == BlockCopy(src=0, dst=2, num_tokens=3) and lease.blocks.tolist() == [2]
    cache.commit(lease, 4)
    assert cache.probe(span(0, 9), ns) == 8 and cache.probe(seq(0, 1, 2, 9, 0), ns) == 4
    cache.check()


def test_going_on_with_the_same_tokens_finds_the_old_blocks(cache, ns):
    lease = cache.claim(span(0, 8), ns)
    cache.commit(lease, 8)
    cache.truncate(lease, 3)
    cache.append(lease, span(3, 8))
    cache.commit(lease, 8)
    assert lease.blocks.tolist() == [0, 1] and cache.stats().deduplicated == 2
    assert figures(cache) == (6, 0, 2)
    cache.check()


def test_truncation_leaves_what_others_hold(cache, ns, run):
    run(cache, range(12), ns)
    one, two = cache.claim(span(0, 13), ns), cache.claim(span(0, 13), ns)
    cache.truncate(one, 4)
    assert refs(cache)[:3] == [2, 1, 1] and cache.probe(span(0, 13), ns) == 12
    assert two.blocks.tolist()[:3] == [0, 1, 2] and two.published == 3
    cache.check()


def test_the_callers_hashes_end_where_the_tokens_change(cache, ns):
    hashes = cache.hasher.block_hashes(span(0, 12), 4, cache.hasher.root(ns))
    lease = cache.claim(span(0, 12), ns, hashes=hashes)
    cache.truncate(lease, 6)
    cache.append(lease, span(50, 56))
    cache.commit(lease, 12)
    expected = seq(*range(6), *range(50, 56))
    own = cache.hasher.block_hashes(expected, 4, cache.hasher.root(ns)).tolist()
    assert lease.hashes.tolist() == cache.snapshot().hashes.tolist() == own


@pytest.mark.parametrize("length", [0, -1, 9])
def test_impossible_lengths_are_refused(cache, ns, length):
    lease = cache.claim(span(0, 8), ns)
    with pytest.raises(InvalidRequest):
        cache.truncate(lease, length)
    assert len(lease) == 8
    cache.release(lease)
    with pytest.raises(StaleLease):
        cache.truncate(lease, 4)


def test_truncation_ends_the_pin_of_a_copy(cache, ns, run):
    run(cache, range(8), ns)
    lease = cache.claim(seq(0, 1, 2, 3, 4, 5, 99), ns)
    assert lease.copy == BlockCopy(1, 2, 2) and refs(cache)[:3] == [1, 1, 1]
    cache.truncate(lease, 5)
    assert (lease.copy, lease.computed, lease.blocks.tolist()) == (None, 5, [0, 2])
    assert refs(cache)[:3] == [1, 0, 1]
    cache.check()
