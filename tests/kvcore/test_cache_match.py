"""What a prompt finds: exact hits, exact blocks."""

import numpy as np
import pytest

from kvcore import match
from kvcore.errors import InvalidRequest
from kvcore.lease import BlockCopy
from kvcore.namespace import Namespace


def seq(*parts):
    """Tokens from numbers and ranges."""
    out = []
    for part in parts:
        out += list(part) if isinstance(part, range) else [part]
    return np.array(out, dtype=np.int32)


def test_only_full_blocks_are_published(cache, ns, run):
    run(cache, range(10), ns)
    assert cache.stats().published == 2
    assert cache.probe(seq(range(10)), ns) == 8
    assert cache.probe(seq(range(30)), ns) == 8


def test_equal_tokens_after_different_prefixes_never_match(cache, ns, run):
    run(cache, [1, 1, 1, 1, 5, 6, 7, 8], ns)
    run(cache, [2, 2, 2, 2, 9, 9, 9, 9], ns)
    assert cache.probe(seq(2, 2, 2, 2, 5, 6, 7, 8, 0), ns) == 4
    assert cache.probe(seq(5, 6, 7, 8, 0), ns) == 0


def test_a_whole_prompt_hit_computes_the_last_token(cache, ns, run):
    run(cache, range(8), ns)
    lease = cache.claim(seq(range(8)), ns)
    assert lease.cached_tokens == lease.computed == 7
    assert lease.blocks.tolist() == [0, 2] and lease.blocks.dtype == np.int32
    assert lease.copy == BlockCopy(src=1, dst=2, num_tokens=3)
    longer = cache.claim(seq(range(9)), ns)
    assert longer.cached_tokens == 8 and longer.copy is None
    assert longer.blocks.tolist() == [0, 1, 3]


@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
def test_even_the_shortest_whole_hit_leaves_a_token(cache, ns, run, tokens):
    run(cache, range(8), ns)
    assert cache.claim(seq(range(tokens)), ns).cached_tokens == tokens - 1


def test_hit_while_the_first_owner_runs_after_it_and_until_eviction(cache, ns, run):
    first = cache.claim(seq(range(9)), ns)
    cache.commit(first, 9)
    assert cache.probe(seq(range(9)), ns) == 8
    second = cache.claim(seq(range(9)), ns)
    assert second.blocks.tolist() == [0, 1, 3]
    cache.release(first)
    cache.release(second)
    assert cache.probe(seq(range(9)), ns) == 8
    run(cache, range(100, 132), ns)
    assert cache.probe(seq(range(9)), ns) == 0


def test_a_missing_block_ends_the_hit(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    run(cache, range(16), ns)
    run(cache, range(100, 104), ns)  # evicts the fourth block
    run(cache, range(200, 204), ns)  # and the third
    assert cache.probe(seq(range(17)), ns) == 8


def test_a_divergence_inside_a_block_hits_to_the_last_common_token(cache, ns, run):
    run(cache, range(8), ns)
    prompt = seq(0, 1, 2, 3, 4, 5, 99, 98, 97)
    lease = cache.claim(prompt, ns)
    assert lease.cached_tokens == 6
    assert lease.copy == BlockCopy(src=1, dst=2, num_tokens=2)
    assert lease.blocks.tolist() == [0, 2, 3]
    cache.commit(lease, 9)
    assert lease.copy is None
    cache.release(lease)
    assert cache.probe(seq(range(9)), ns) == 8, "the shared block is unchanged"
    assert cache.probe(seq(0, 1, 2, 3, 4, 5, 99, 98, 0), ns) == 8
    cache.check()


def test_the_longest_of_many_children_is_found(make_cache, ns, run):
    cache = make_cache(num_blocks=32)
    run(cache, [7, 7, 7, 7], ns)
    for end in ([1, 1, 1, 1], [1, 2, 1, 1], [1, 2, 3, 1], [1, 2, 4, 4], [2, 2, 2, 2], [0, 9, 9, 9]):
        run(cache, [7, 7, 7, 7, *end], ns)
    hits = {(1, 2, 3, 9): 7, (1, 2, 3, 0): 7, (1, 2, 9, 9): 6, (1, 9, 0, 0): 5, (3, 3, 3, 3): 4}
    for wanted, hit in hits.items():
        assert cache.probe(seq(7, 7, 7, 7, *wanted, 0), ns) == hit
    assert cache.probe(seq(7, 7, 0, 0, 0), ns) == 2, "the same below the root"


def test_the_source_of_a_copy_is_pinned_until_the_first_commit(make_cache, ns, run):
    cache = make_cache(num_blocks=3)
    run(cache, range(8), ns)
    lease = cache.claim(seq(0, 1, 2, 3, 4, 5, 99), ns)
    assert lease.copy == BlockCopy(1, 2, 2)
    assert cache.stats().held == 3
    cache.commit(lease, lease.cached_tokens)
    assert (cache.stats().held, cache.stats().cached) == (2, 1)
    cache.check()


def test_the_source_of_a_copy_is_pinned_until_release_without_a_commit(make_cache, ns, run):
    cache = make_cache(num_blocks=3)
    run(cache, range(8), ns)
    lease = cache.claim(seq(0, 1, 2, 3, 4, 5, 99), ns)
    cache.release(lease)
    assert lease.copy is None
    assert (cache.stats().free, cache.stats().cached) == (1, 2)
    cache.check()


def test_a_partial_hit_never_makes_a_claim_fail(make_cache, ns, run):
    cache = make_cache(num_blocks=2)
    run(cache, range(8), ns)
    lease = cache.claim(seq(0, 1, 2, 3, 4, 5, 99), ns)  # pinning block 1 as source would leave no block
    assert lease.cached_tokens == 4 and lease.copy is None
    assert lease.blocks.tolist() == [0, 1]


def test_read_false_reads_nothing_and_fills(cache, ns, run):
    run(cache, range(8), ns)
    lease = cache.claim(seq(range(9)), ns, read=False)
    assert lease.cached_tokens == 0
    assert lease.blocks.tolist() == [2, 3, 4]
    cache.commit(lease, 9)
    assert lease.blocks.tolist() == [0, 1, 4], "identical blocks are shared after all"
    assert cache.stats().deduplicated == 2
    other = cache.claim(seq(range(50, 58)), ns, read=False)
    cache.commit(other, 8)
    assert cache.probe(seq(range(50, 59)), ns) == 8


def test_publish_false_reads_and_fills_nothing(cache, ns, run):
    run(cache, range(4), ns)
    lease = run(cache, range(9), ns, publish=False)
    assert lease.cached_tokens == 4
    assert cache.probe(seq(range(9)), ns) == 4
    neither = run(cache, range(9), ns, read=False, publish=False)
    assert neither.cached_tokens == 0
    assert cache.stats().published == 1


def test_a_probe_changes_nothing(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=4)
    run(cache, range(8), ns)
    clock.now = 5.0
    run(cache, range(100, 108), ns)
    before = cache.stats()
    for _ in range(3):
        assert cache.probe(seq(range(9)), ns) == 8
        assert cache.probe(seq(0, 1, 2), Namespace("never seen")) == 0
    assert cache.stats() == before and cache.seq == 2
    run(cache, range(200, 204), ns)
    assert cache.probe(seq(range(9)), ns) == 4, "the probed blocks were still the oldest"


def test_probe_of_nothing(cache, ns):
    assert cache.probe(seq(), ns) == 0


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_collision_never_returns_another_prompts_block(make_cache, ns, bits):
    cache = make_cache(num_blocks=64, block_size=2, bits=bits)
    rng = np.random.default_rng(bits)
    resident = set()
    for _ in range(200):
        prompt = rng.integers(0, 3, 9).astype(np.int32)
        lease = cache.claim(prompt, ns)
        hit = tuple(prompt[: lease.cached_tokens // 2 * 2].tolist())
        assert hit == () or hit in resident
        cache.commit(lease, 9)
        resident |= {tuple(prompt[:end].tolist()) for end in range(2, 2 * lease.published + 1, 2)}
        cache.release(lease)
        cache.check()
    assert cache.stats().published <= 2**bits
    assert cache.stats().collisions > 100


def test_a_collision_inside_one_sequence_stops_its_publishing(make_cache, ns):
    cache = make_cache(bits=1, block_size=1)
    lease = cache.claim(seq(range(8)), ns)
    cache.commit(lease, 8)
    hashes = lease.hashes.tolist()
    first_repeated = next(i for i, h in enumerate(hashes) if h in hashes[:i])
    assert lease.published == first_repeated <= 2
    assert cache.stats().collisions == 1
    cache.check()


def test_hashes_of_the_caller_are_used_and_extended(cache, ns):
    hasher = cache.hasher
    prompt = seq(range(9))
    hashes = hasher.block_hashes(prompt, 4, hasher.root(ns))
    lease = cache.claim(prompt, ns, hashes=hashes)
    cache.append(lease, seq(9, 10, 11))
    cache.commit(lease, 12)
    expected = hasher.block_hashes(seq(range(12)), 4, hasher.root(ns))
    assert lease.hashes.tolist() == expected.tolist()
    assert cache.snapshot().hashes.tolist() == expected.tolist()
    assert cache.probe(seq(range(13)), ns) == 12


def test_wrong_hashes_of_a_caller_cost_hits_and_never_answers(cache, ns, run):
    run(cache, range(8), ns)
    zeros = np.zeros(2, dtype=np.uint64)
    run(cache, range(50, 58), ns, hashes=zeros)
    assert cache.probe(seq(range(8)), ns, zeros) == 4, "found by its tokens below the root, to be copied"
    assert cache.probe(seq(range(4, 8)), ns, zeros) == 0
    assert cache.stats().collisions == 1


@pytest.mark.parametrize(
    "hashes", [np.zeros(1, dtype=np.uint64), np.zeros(2, dtype=np.int64), np.zeros((2, 1), dtype=np.uint64)]
)
def test_hashes_of_a_wrong_shape_are_refused(cache, ns, hashes):
    with pytest.raises(InvalidRequest):
        cache.claim(seq(range(8)), ns, hashes=hashes)
    cache.check()


@pytest.mark.parametrize("tokens", [[], [1.5], [[1]], [2**40]])
def test_wrong_tokens_are_refused(cache, ns, tokens):
    with pytest.raises(InvalidRequest):
        cache.claim(tokens, ns)
    assert cache.stats().free == 8


def test_a_caller_may_reuse_its_arrays(cache, ns):
    prompt = seq(range(9))
    hashes = cache.hasher.block_hashes(prompt, 4, cache.hasher.root(ns))
    lease = cache.claim(prompt, ns, hashes=hashes)
    prompt[:] = 0
    hashes[:] = 0
    cache.commit(lease, 9)
    assert lease.tokens.tolist() == list(range(9))
    assert cache.probe(seq(range(9)), ns) == 8


# --- Isolation ---

SPACES = [
    Namespace("m"),
    Namespace("m2"),
    Namespace("m", layout="f16"),
    Namespace("m", adapter="x"),
    Namespace("m", adapter="y"),
    Namespace("m", tenant="x"),
    Namespace("m", salt="x"),
    Namespace("m", salt=""),
    Namespace("m", salt=0),
    Namespace("m", salt="0"),
]


def test_namespaces_never_share_and_each_hits_itself(make_cache, run):
    cache = make_cache(num_blocks=64)
    prompt = seq(range(9))
    for i, space in enumerate(SPACES):
        assert [cache.probe(prompt, other) for other in SPACES] == [8] * i + [0] * (len(SPACES) - i)
        run(cache, prompt, space)
    assert cache.stats().published == 2 * len(SPACES)


def test_partial_matches_do_not_cross_namespaces_either(make_cache, run):
    cache = make_cache(num_blocks=64)
    run(cache, range(8), SPACES[0])
    short = seq(0, 1, 99)
    assert [cache.probe(short, space) for space in SPACES] == [2] + [0] * (len(SPACES) - 1)


def test_equal_hashes_in_two_namespaces_do_not_match(cache, run):
    """A router with a wrong root, or a collision: the tree of the other namespace is not entered."""
    hashes = np.array([11, 12], dtype=np.uint64)
    run(cache, range(8), SPACES[0], hashes=hashes)
    assert cache.probe(seq(range(9)), SPACES[0], hashes) == 8
    run(cache, [7], SPACES[1])
    assert cache.probe(seq(range(9)), SPACES[1], hashes) == 0
    lease = cache.claim(seq(range(9)), SPACES[1], hashes=hashes)
    cache.commit(lease, 9)
    assert lease.published == 0 and cache.stats().collisions == 1
    cache.check()


def test_a_namespace_without_a_place_in_the_pool_hits_nothing(cache, ns, run):
    """What a probe sees while another thread makes room for more namespaces."""
    hashes = run(cache, range(8), ns).hashes
    for space in (-1, len(cache._state.pool.spaces), 1 << 20):
        table = np.empty(2, dtype=np.int32)
        assert match.find(cache._state.pool, seq(range(9)), hashes, space, table) == (0, -1, 0)


def test_namespaces_are_forgotten_with_their_last_block(make_cache, run):
    cache = make_cache(num_blocks=4)
    for salt in range(50):
        run(cache, range(9), Namespace("m", salt=salt))
    assert len(cache._state.spaces) == 2  # 4 blocks of 2 published each
    cache.clear()
    assert len(cache._state.spaces) == 0
