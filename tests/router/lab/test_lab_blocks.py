import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.lab.blocks import Blocks
from router.lab.ideal import common_prefix

id_lists = st.lists(st.integers(0, 5), max_size=12)


@given(id_lists, st.integers(0, 40))
def test_ids_are_kept_as_they_are_and_the_rest_is_the_prompts_own(ids, more):
    num_tokens = max(1, 4 * len(ids) + more)
    blocks = Blocks.of(ids, 4, num_tokens, own=3)
    found = blocks.ids.tolist()
    assert found[: len(ids)] == ids
    assert len(found) == -(-num_tokens // 4) and all(own < 0 for own in found[len(ids) :])
    assert len(set(found[len(ids) :])) == len(found) - len(ids)
    assert len(blocks.token_ids()) == num_tokens


def test_runs_are_compact():
    ids = [0, *range(14, 400), 7, 8]
    blocks = Blocks.of(ids, 512, 512 * len(ids), own=1)
    assert blocks.runs.tolist() == [[0, 1], [14, 386], [7, 2]]
    assert Blocks.of_runs(blocks.runs, 512, 512 * len(ids), own=1).ids.tolist() == ids


@settings(deadline=None)  # the first call compiles
@given(id_lists, id_lists)
def test_equal_keys_are_equal_prefixes_of_tokens(left, right):
    a, b = (Blocks.of(ids, 8, 8 * len(ids) or 1, own) for own, ids in enumerate((left, right), start=1))
    same = common_prefix(a.token_ids(), b.token_ids()) // 8
    keys = min(len(left), len(right))
    equal = (a.keys()[:keys] == b.keys()[:keys]).tolist()
    assert equal == [number < same for number in range(keys)]


def test_own_blocks_of_different_prompts_differ():
    a, b = Blocks.of([], 16, 100, own=1), Blocks.of([], 16, 100, own=2)
    assert not np.isin(a.ids, b.ids).any()
    assert (a.token_ids() == b.token_ids()).mean() < 0.1


@pytest.mark.parametrize(
    "factor, size, tokens, count", [(0.5, 256, 550, 3), (1 / 512, 1, 2, 2), (2, 1024, 2200, 3)]
)
def test_scaled(factor, size, tokens, count):
    scaled = Blocks.of([5, 6, 7], 512, 1100, own=1).scaled(factor)
    assert (scaled.size, scaled.num_tokens, scaled.ids.tolist()) == (size, tokens, [5, 6, 7][:count])
