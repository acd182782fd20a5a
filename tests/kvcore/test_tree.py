"""The search tree of siblings alone: against a sorted list, with random hashes and with all hashes equal."""

import random

import numpy as np
import pytest

from kvcore import tree

ROOT = -1  # the first namespace


def in_order(pool, block):
    """Tokens of a tree's blocks from left to right; a loop, because equal hashes make deep trees."""
    out, path = [], []
    while block >= 0 or path:
        while block >= 0:
            path.append(block)
            block = int(pool.blocks["left"][block])
        block = path.pop()
        out.append(tuple(pool.tokens[block].tolist()))
        block = int(pool.blocks["right"][block])
    return out


def is_heap(pool, root):
    """Whether no block has a larger hash than the one above it."""
    pending, hashes = [root], pool.blocks["hash"]
    while pending:
        block = pending.pop()
        for side in ("left", "right"):
            below = int(pool.blocks[side][block])
            if below >= 0:
                if hashes[below] > hashes[block]:
                    return False
                pending.append(below)
    return True


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


@pytest.mark.parametrize("equal_hashes", [False, True])
@pytest.mark.parametrize("under", ["root", "block"])
def test_against_a_sorted_list(make_cache, equal_hashes, under):
    size, rng = 150, random.Random(1)
    pool = make_cache(num_blocks=size + 1, block_size=3)._state.pool
    parent = ROOT if under == "root" else size
    pool.spaces["child"][0] = pool.blocks["child"][size] = -1
    contents = rng.sample([(a, b, c) for a in range(-3, 4) for b in range(6) for c in range(6)], size)
    pool.tokens[:size] = contents
    pool.blocks["hash"][:size] = [7 if equal_hashes else rng.getrandbits(64) for _ in range(size)]
    model = set()
    for _ in range(600):
        block = rng.randrange(size)
        if block in model:
            tree.detach(pool, parent, block)
            model.remove(block)
        else:
            tree.attach(pool, parent, block)
            model.add(block)
        root = tree.first_child(pool, parent)
        assert in_order(pool, root) == sorted(contents[i] for i in model)
        assert root < 0 or is_heap(pool, root)
        wanted = np.array([9, *rng.choice(contents)[:2], rng.randrange(6)], dtype=np.int32)
        end = rng.randint(1, 4)
        best, most = tree.closest(pool, parent, wanted, 1, end)
        lengths = {i: common(contents[i], wanted[1:end].tolist()) for i in model}
        assert most == max(lengths.values(), default=0)
        assert (best == -1) == (most == 0) and (best < 0 or lengths[best] == most)
    for block in sorted(model):
        tree.detach(pool, parent, block)
    assert tree.first_child(pool, parent) == -1


def test_closest_takes_at_most_a_block(make_cache):
    pool = make_cache(num_blocks=2, block_size=3)._state.pool
    pool.spaces["child"][0] = -1
    pool.tokens[0] = (1, 2, 3)
    tree.attach(pool, ROOT, 0)
    wanted = np.array([1, 2, 3, 4, 5], dtype=np.int32)
    assert tree.closest(pool, ROOT, wanted, 0, 5) == (0, 3)
    assert tree.closest(pool, ROOT, wanted, 0, 2) == (0, 2)
    assert tree.closest(pool, ROOT, wanted, 2, 2) == (-1, 0)
    assert tree.closest(pool, ROOT, wanted, 3, 5) == (-1, 0)
