import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.lab.blocks import Blocks
from router.lab.ideal import InfiniteCache, common_prefix, ideal_hits, resident_hits
from router.lab.record import Request

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=30)


def as_tokens(values):
    return np.array(values, np.int32)


def naive_prefix(left, right):
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def naive_hits(sequences):
    hits = []
    for index, prompt in enumerate(sequences):
        best = max((naive_prefix(prompt, earlier) for earlier in sequences[:index]), default=0)
        hits.append(min(best, len(prompt) - 1))
    return hits


@given(prompts)
def test_equals_the_comparison_of_all_pairs(sequences):
    assert ideal_hits(map(as_tokens, sequences)) == naive_hits(sequences)


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_common_prefix(left, right):
    assert common_prefix(as_tokens(left), as_tokens(right)) == naive_prefix(left, right)


def test_the_last_token_is_never_a_hit():
    cache = InfiniteCache()
    assert [cache.add(as_tokens([5, 6, 7])) for _ in range(2)] == [0, 2]
    assert cache.add(as_tokens([5])) == 0
    assert cache.add(as_tokens([5, 6])) == 1


def test_hits_do_not_stop_at_block_borders():
    first = np.arange(1000, dtype=np.int32)
    second = first.copy()
    second[777] = -1
    assert ideal_hits([first, second, second]) == [0, 777, 999]


def test_growing_conversation_hits_all_of_its_past():
    turns = [np.arange(n, dtype=np.int32) for n in (10, 25, 60)]
    assert ideal_hits(turns) == [0, 10, 25]


def test_empty_prompt_hits_nothing():
    assert ideal_hits([as_tokens([]), as_tokens([1]), as_tokens([])]) == [0, 0, 0]


@given(prompts)
def test_find_is_add_that_forgets_and_may_find_all(sequences):
    cache = InfiniteCache()
    for prompt in map(as_tokens, sequences):
        found = cache.find(prompt)
        assert min(found, len(prompt) - 1) == cache.add(prompt) and cache.find(prompt) == len(prompt)


@given(prompts, st.integers(1, 4))
def test_only_full_blocks_are_resident_and_hits_end_anywhere(sequences, size):
    kept = [prompt[: len(prompt) // size * size] for prompt in sequences]
    expected = [
        max((naive_prefix(prompt, other) for other in kept[:number]), default=0)
        for number, prompt in enumerate(sequences)
    ]
    assert resident_hits([Request(token_ids=as_tokens(prompt)) for prompt in sequences], size) == expected


def test_hash_ids_of_other_blocks_than_the_caches():
    rows = [[1, 2, 3], [1, 2, 9], [1, 2, 3, 4], [1]]
    requests = [Request(blocks=Blocks.of(ids, 4, 4 * len(ids), own=1)) for ids in rows]
    # Of the first prompt's 12 tokens blocks of 8 hold 8, of the third one's 16 all.
    assert resident_hits(requests, 8) == [0, 8, 8, 4]
    assert resident_hits(requests, 4) == resident_hits(requests, 2) == [0, 8, 12, 4]
