"""Media items in prompts: exact pseudo tokens, exactly who shares with whom, and what is refused."""

import hashlib

import numpy as np
import pytest

from kvcore.errors import InvalidRequest
from kvcore.lease import BlockCopy
from kvcore.multimodal import Media, with_media

CAT, DOG = hashlib.sha256(b"cat").digest(), hashlib.sha256(b"dog").digest()
PLACEHOLDER = 7


def prompt(*parts):
    """A prompt of text (lists of tokens) and items (digest, length), as the cache gets it."""
    tokens, items = [], []
    for part in parts:
        if isinstance(part, tuple):
            items.append(Media(len(tokens), part[1], part[0]))
            tokens += [PLACEHOLDER] * part[1]
        else:
            tokens += part
    return with_media(np.array(tokens, dtype=np.int32), items)


def test_pseudo_tokens_follow_the_formula():
    tokens = np.full(40, PLACEHOLDER, dtype=np.int32)
    out = with_media(tokens, [Media(3, 20, CAT)])
    seed = b"warmroute.media" + (20).to_bytes(8, "little") + CAT
    stream = hashlib.shake_256(seed).digest(80)
    words = [int.from_bytes(stream[4 * i : 4 * i + 4], "little") for i in range(20)]
    assert out[3:23].tolist() == [(word & 0x7FFFFFFF) - (1 << 31) for word in words]
    assert out.dtype == np.int32 and (out[3:23] < 0).all()
    assert out[:3].tolist() == [PLACEHOLDER] * 3 and out[23:].tolist() == [PLACEHOLDER] * 17
    assert tokens.tolist() == [PLACEHOLDER] * 40, "the model's own prompt stays as it is"


def test_values_are_pinned():
    """Changing these means that routers and replicas of different versions no longer agree."""
    assert prompt((CAT, 4)).tolist() == [-1556419230, -1640935507, -1782021596, -1849708556]


def test_every_bit_of_the_digest_counts():
    longer = bytes(100)
    seen = {tuple(prompt((longer, 4)))}
    for place in range(800):
        changed = bytearray(longer)
        changed[place // 8] ^= 1 << place % 8
        seen.add(tuple(prompt((bytes(changed), 4))))
    seen |= {tuple(prompt((bytes(99), 4))), tuple(prompt((bytes(101), 4)))}
    assert len(seen) == 803


def test_items_in_any_order_side_by_side_and_none():
    tokens = np.zeros(8, dtype=np.int32)
    one, two = Media(0, 4, CAT), Media(4, 4, DOG)
    assert with_media(tokens, [two, one]).tolist() == with_media(tokens, [one, two]).tolist()
    assert with_media(tokens, [one, two]).tolist() == [*prompt((CAT, 4)), *prompt((DOG, 4))]
    assert with_media(tokens, []).tolist() == [0] * 8 and with_media(tokens, []) is not tokens


TEXT = [1, 2, 3, 4]
END = [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("other", "hit"),
    [
        (prompt(TEXT, (CAT, 8), END), 16),  # the same: all full blocks
        (prompt(TEXT, (CAT, 8), [5, 6, 9, 9, 9]), 14),  # up to the first other word after the image
        (prompt(TEXT, (DOG, 8), END), 4),  # another image: only the text before it
        (prompt([1, 2, 3], (CAT, 8), [4], END), 3),  # the same image one place earlier
        (prompt(TEXT, (CAT, 9), END), 4),  # the same digest in another size
        (prompt((CAT, 8), TEXT, END), 0),  # the image first
        (np.array([*TEXT, *[PLACEHOLDER] * 8, *END], dtype=np.int32), 4),  # placeholders of no image
        (prompt([9, 9, 9, 9], (CAT, 8), END), 0),  # the same image after another text
    ],
)
def test_who_shares_with_a_text_an_image_and_a_text(make_cache, ns, run, other, hit):
    cache = make_cache(num_blocks=16)
    run(cache, prompt(TEXT, (CAT, 8), END), ns)
    assert cache.probe(other, ns) == hit


def test_text_between_two_images_depends_on_the_first_only(make_cache, ns, run):
    cache = make_cache(num_blocks=16)
    run(cache, prompt((CAT, 4), TEXT, (DOG, 4), [0]), ns)
    assert cache.probe(prompt((CAT, 4), TEXT, (CAT, 4), [0]), ns) == 8
    assert cache.probe(prompt((DOG, 4), TEXT, (DOG, 4), [0]), ns) == 0
    swapped = prompt((DOG, 4), TEXT, (CAT, 4), [0])
    assert cache.probe(swapped, ns) == 0
    assert run(cache, swapped, ns).cached_tokens == 0 and cache.stats().published == 6


def test_an_image_that_begins_inside_a_block_is_not_copied_from_another(make_cache, ns, run):
    cache = make_cache(num_blocks=16)
    run(cache, prompt([1, 2], (CAT, 6), [0]), ns)
    lease = cache.claim(prompt([1, 2], (DOG, 6), [0]), ns)
    assert lease.cached_tokens == 2 and lease.copy == BlockCopy(src=0, dst=2, num_tokens=2)


def test_keys_agree_wherever_they_are_computed(make_cache, ns):
    cache, other = make_cache(), make_cache()
    hashes = [
        c.hasher.block_hashes(prompt(TEXT, (CAT, 8)), 4, c.hasher.root(ns)).tolist() for c in (cache, other)
    ]
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 3


@pytest.mark.parametrize("wrong", [(-1, 4, CAT), (0, 3, CAT), (0, 0, CAT), (0, 4, b""), (0, 4, "text")])
def test_impossible_items_are_refused(wrong):
    with pytest.raises(InvalidRequest):
        Media(*wrong)


@pytest.mark.parametrize("places", [[(0, 5), (4, 4)], [(4, 4), (0, 5)], [(0, 4), (0, 4)], [(5, 4)], [(8, 4)]])
def test_items_that_overlap_or_stick_out_are_refused(places):
    with pytest.raises(InvalidRequest, match="overlaps another or the prompt's end"):
        with_media(np.zeros(8, dtype=np.int32), [Media(*place, CAT) for place in places])


def test_tokens_that_could_pass_for_pseudo_tokens_are_refused():
    with pytest.raises(InvalidRequest, match="negative"):
        with_media(np.array([1, -5, 2, 3, 4], dtype=np.int32), [])
