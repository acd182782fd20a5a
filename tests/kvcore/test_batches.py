"""Claims of a batch: every member's hit is safe before any member takes blocks."""

import numpy as np
import pytest

from kvcore.errors import InvalidRequest
from kvcore.lease import BlockCopy, Prompt


def seq(*tokens):
    return np.array(tokens, dtype=np.int32)


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


def tables(leases):
    return [lease and lease.blocks.tolist() for lease in leases]


def test_a_stranger_does_not_evict_what_a_later_member_hits(make_cache, ns, run):
    cache = make_cache(num_blocks=5)
    run(cache, range(8), ns)  # blocks 0 and 1, the oldest
    run(cache, range(50, 58), ns)  # blocks 2 and 3
    stranger, follower = cache.claim_many([Prompt(span(90, 98), ns), Prompt(span(0, 12), ns)])
    assert tables([stranger, follower]) == [[3, 4], [0, 1, 2]]
    assert (stranger.cached_tokens, follower.cached_tokens) == (0, 8)
    cache.check()


def test_one_after_the_other_it_would_have(make_cache, ns, run):
    cache = make_cache(num_blocks=5)
    run(cache, range(8), ns)
    run(cache, range(50, 58), ns)
    cache.claim(span(90, 98), ns)
    assert cache.claim(span(0, 12), ns).cached_tokens == 4


def test_who_finds_too_few_blocks_changes_nothing_and_later_ones_go_on(make_cache, ns, run, victims):
    cache = make_cache(num_blocks=5)
    run(cache, range(12), ns)
    before, order = cache.stats(), victims(cache)
    large, small = cache.claim_many([Prompt(span(50, 66), ns), Prompt(span(0, 9), ns)])
    assert large is None and tables([small]) == [[0, 1, 3]]
    stats = cache.stats()
    assert (stats.claims - before.claims, stats.missed_tokens - before.missed_tokens) == (1, 1)
    assert (stats.leases, stats.evictions, cache.seq) == (1, 0, 1)
    cache.release(small)
    assert victims(cache) == order == [2, 1, 0]
    cache.check()


def test_the_hit_of_a_member_that_fails_is_free_for_later_ones(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    run(cache, range(16), ns)
    failed, other = cache.claim_many([Prompt(span(0, 24), ns), Prompt(span(50, 66), ns)])
    assert failed is None and tables([other]) == [[0, 1, 2, 3]]
    assert cache.stats().evictions == 4
    cache.check()


def test_first_ones_first(make_cache, ns):
    cache = make_cache(num_blocks=4)
    leases = cache.claim_many([Prompt(span(start, start + 8), ns) for start in (0, 50, 90)])
    assert tables(leases) == [[0, 1], [2, 3], None]


def test_what_a_later_member_copies_from_is_safe_too(make_cache, ns, run):
    cache = make_cache(num_blocks=6)
    for start in (0, 10, 20):
        run(cache, range(start, start + 4), ns)  # blocks 0, 1 and 2
    stranger, partial = cache.claim_many([Prompt(span(90, 106), ns), Prompt(seq(0, 1, 9), ns)])
    assert tables([stranger, partial]) == [[1, 3, 4, 5], [2]]
    assert partial.copy == BlockCopy(src=0, dst=2, num_tokens=2) and partial.cached_tokens == 2
    cache.check()


def test_a_copy_is_given_up_where_its_block_is_the_last(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    for start in (0, 10):
        run(cache, range(start, start + 4), ns)
    stranger, partial = cache.claim_many([Prompt(span(90, 101), ns), Prompt(seq(0, 1, 9), ns)])
    assert tables([stranger, partial]) == [[1, 2, 3], [0]]
    assert partial.copy is None and partial.cached_tokens == 0
    cache.check()


def test_the_same_prompt_twice(cache, ns, run):
    run(cache, range(8), ns)
    one, two = cache.claim_many([Prompt(span(0, 9), ns)] * 2)
    assert tables([one, two]) == [[0, 1, 2], [0, 1, 3]]
    assert cache._state.pool.blocks["refs"][:4].tolist() == [2, 2, 1, 1]


def test_members_read_and_publish_as_they_say(cache, ns, run):
    run(cache, range(8), ns)
    silent, blind = cache.claim_many(
        [Prompt(span(0, 13), ns, publish=False), Prompt(span(0, 9), ns, read=False)]
    )
    assert (silent.cached_tokens, blind.cached_tokens) == (8, 0)
    cache.commit(silent, 13)
    assert cache.probe(span(0, 13), ns) == 8


def test_one_wrong_member_refuses_all_before_anything_changes(cache, ns):
    for wrong in (Prompt(seq(), ns), Prompt(span(0, 8), ns, np.zeros(1, dtype=np.uint64))):
        with pytest.raises(InvalidRequest):
            cache.claim_many([Prompt(span(0, 8), ns), wrong])
    assert cache.stats().free == 8 and cache.stats().leases == 0
    cache.check()


def test_no_members(cache):
    assert cache.claim_many([]) == []
