"""Prefix hashes: the formula in plain integers, pinned values, secrets, namespaces, and what is refused."""

import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.arrays import as_tokens
from kvcore.errors import InvalidRequest
from kvcore.hashing import PrefixHasher, mix
from kvcore.namespace import Namespace

NS = Namespace("m")
MASK = (1 << 64) - 1


def ints(*values):
    return np.array(values, dtype=np.int32)


def test_splitmix64_has_the_published_values():
    # Outputs of SplitMix64 with seed 1234567: finalizer(seed + (i + 1) * golden gamma).
    seeds = [np.uint64((1234567 + i * 0x9E3779B97F4A7C15) & MASK) for i in (1, 2, 3)]
    mixed = [int(mix(seed)) for seed in seeds]
    assert mixed == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def plain(hasher, tokens, size, root):
    """The formula of the module docstring, in Python integers."""

    def mixed(z):
        return int(mix(np.uint64(z & MASK)))

    add, mul, step = hasher._constants(size)
    step = int(step)
    total, hashes = 0, []
    for k in range(len(tokens) // size):
        content = 0
        for j in range(size):
            y = (int(tokens[k * size + j]) + int(add[j])) * int(mul[j]) & MASK
            content += y ^ (y >> 29)
        total += mixed(content + (k + 1) * step)
        hashes.append(mixed(root + total))
    return hashes


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(1, 7))
def test_vectorised_equals_the_formula(tokens, size):
    hasher = PrefixHasher(b"s")
    root = hasher.root(NS)
    array = np.array(tokens, dtype=np.int32)
    assert hasher.block_hashes(array, size, root).tolist() == plain(hasher, array, size, root)


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 12))
def test_a_chain_extended_in_parts_equals_one_pass(first, second):
    hasher = PrefixHasher(b"s")
    root = hasher.root(NS)
    tokens = np.arange(3 * (first + second), dtype=np.int32)
    chain = hasher.chain(3, root)
    parts = [chain.extend(tokens[: 3 * first]), chain.extend(tokens[3 * first :])]
    assert np.array_equal(np.concatenate(parts), hasher.block_hashes(tokens, 3, root))


@pytest.mark.parametrize("bits", [64, 7])
def test_the_last_hash_below_other_roots(bits):
    hasher, tokens = PrefixHasher(b"s", bits), np.arange(15, dtype=np.int32)
    roots = [hasher.root(Namespace("m", salt=salt)) for salt in range(5)]
    chain = hasher.chain(3, hasher.root(NS))
    chain.extend(tokens)
    expected = [hasher.block_hashes(tokens, 3, root)[-1] for root in roots]
    assert chain.last_below(np.array(roots, dtype=np.uint64)).tolist() == expected
    assert chain.last_below(np.array([], dtype=np.uint64)).tolist() == []


def test_shape_and_dtype():
    hasher = PrefixHasher(b"s")
    hashes = hasher.block_hashes(np.arange(11, dtype=np.int32), 4, hasher.root(NS))
    assert hashes.shape == (2,) and hashes.dtype == np.uint64
    assert hasher.block_hashes(ints(1, 2, 3), 4, hasher.root(NS)).shape == (0,)


def test_values_are_pinned():
    """Changing these means that routers and replicas of different versions no longer agree."""
    hasher = PrefixHasher(b"warmroute")
    root = hasher.root(NS)
    assert f"{root:016x}" == "d8e5a574f721a82c"
    hashes = hasher.block_hashes(np.arange(8, dtype=np.int32), 4, root)
    assert [f"{h:016x}" for h in hashes.tolist()] == ["565f78099134b6cc", "57935717cddfdf4e"]


def test_a_hash_depends_on_every_token_before_it():
    hasher = PrefixHasher(b"s")
    root = hasher.root(NS)
    tokens = np.arange(64, dtype=np.int32)
    hashes = hasher.block_hashes(tokens, 4, root)
    for place in range(64):
        changed = tokens.copy()
        changed[place] += 1
        differ = hasher.block_hashes(changed, 4, root) != hashes
        assert differ.tolist() == [block >= place // 4 for block in range(16)]


def test_order_of_blocks_and_tokens_counts():
    hasher = PrefixHasher(b"s")
    root = hasher.root(NS)
    prompts = [ints(1, 2, 3, 4), ints(2, 1, 3, 4), ints(3, 4, 1, 2), ints(1, 2, 4, 3)]
    assert len({int(hasher.block_hashes(prompt, 2, root)[-1]) for prompt in prompts}) == 4


def test_no_collisions_among_many_short_prompts():
    hasher = PrefixHasher(b"s")
    tokens = np.arange(200_000, dtype=np.int32)
    hashes = hasher.block_hashes(tokens, 1, hasher.root(NS))
    assert len(np.unique(hashes)) == 200_000


def test_secret_namespace_and_block_size_separate():
    first, second = PrefixHasher(b"a"), PrefixHasher(b"b")
    tokens = np.arange(16, dtype=np.int32)
    ends = {
        int(first.block_hashes(tokens, 16, first.root(NS))[-1]),
        int(first.block_hashes(tokens, 8, first.root(NS))[-1]),
        int(first.block_hashes(tokens, 16, first.root(Namespace("other")))[-1]),
        int(second.block_hashes(tokens, 16, second.root(NS))[-1]),
        int(second.block_hashes(tokens, 16, first.root(NS))[-1]),
    }
    assert len(ends) == 5


def test_same_secret_same_keys_in_another_process():
    code = (
        "import numpy as np; from kvcore.hashing import PrefixHasher; from kvcore.namespace import Namespace;"
        "h = PrefixHasher(b's'); r = h.root(Namespace('m'));"
        "print(h.block_hashes(np.arange(8, dtype=np.int32), 4, r))"
    )
    answers = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    hasher = PrefixHasher(b"s")
    here = hasher.block_hashes(np.arange(8, dtype=np.int32), 4, hasher.root(NS))
    assert answers == {f"{here}\n"}


def test_without_a_secret_one_is_drawn_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        first, second = PrefixHasher(), PrefixHasher()
    assert first.root(NS) != second.root(NS)
    assert PrefixHasher(first.secret).root(NS) == first.root(NS)
    assert len(caplog.records) == 2 and "need the same secret" in caplog.text
    assert first.secret.hex() not in caplog.text and repr(first.secret) not in caplog.text


def test_a_long_secret_counts_in_full():
    assert PrefixHasher(b"x" * 100 + b"a").root(NS) != PrefixHasher(b"x" * 100 + b"b").root(NS)


@pytest.mark.parametrize("bits", [1, 3, 63])
def test_fewer_bits_keep_the_low_ones(bits):
    tokens = np.arange(400, dtype=np.int32)
    full, few = PrefixHasher(b"s"), PrefixHasher(b"s", bits=bits)
    expected = full.block_hashes(tokens, 4, full.root(NS)) & np.uint64((1 << bits) - 1)
    assert np.array_equal(few.block_hashes(tokens, 4, few.root(NS)), expected)


def test_wrong_arguments_are_refused():
    hasher = PrefixHasher(b"s")
    for make in (
        lambda: PrefixHasher(b""),
        lambda: PrefixHasher(b"s", bits=0),
        lambda: PrefixHasher(b"s", bits=65),
        lambda: hasher.block_hashes(ints(1), 0, 0),
        lambda: hasher.chain(4, 0).extend(ints(1, 2, 3)),
    ):
        with pytest.raises(InvalidRequest):
            make()


def test_as_tokens_takes_integers_that_fit():
    assert as_tokens([1, 2]).dtype == np.int32
    assert as_tokens(np.array([2**31 - 1, -(2**31)])).tolist() == [2**31 - 1, -(2**31)]
    assert as_tokens([]).shape == (0,)
    given_array = ints(1, 2)
    assert as_tokens(given_array) is given_array


@pytest.mark.parametrize("wrong", [[1.5], [[1, 2]], [2**31], [-(2**31) - 1], ["a"], 3, [None]])
def test_as_tokens_refuses_the_rest(wrong):
    with pytest.raises(InvalidRequest):
        as_tokens(wrong)
