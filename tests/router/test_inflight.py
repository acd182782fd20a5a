"""The overlay of prompts in flight against the obvious model: compare every prompt with every other."""

import random

import numpy as np

from router.inflight import InFlight


def prompts(count, seed=0):
    """Prefix hashes of prompts that share prefixes of many lengths (a random tree)."""
    rng = random.Random(seed)
    known = [np.array([], dtype=np.uint64)]
    for _ in range(count):
        stem = rng.choice(known)
        fresh = [rng.getrandbits(64) for _ in range(rng.randint(0, 12))]
        known.append(np.concatenate([stem[: rng.randint(0, len(stem))], np.array(fresh, dtype=np.uint64)]))
    return known[1:]


def shared(a, b):
    """Length of the common prefix."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())


def test_agrees_with_comparing_every_pair_through_adds_moves_and_removals():
    rng = random.Random(1)
    overlay, live = InFlight(), {}
    for prompt in prompts(1500, seed=1):
        if len(prompt):
            slot = rng.randrange(8)
            live[overlay.add(slot, prompt)] = [slot, prompt]
        if live and rng.random() < 0.55:
            entry = rng.choice(list(live))
            overlay.remove(entry)
            overlay.remove(entry)  # once more changes nothing
            del live[entry]
        if live and rng.random() < 0.2:
            entry = rng.choice(list(live))
            live[entry][0] = rng.randrange(8)
            overlay.move(entry, live[entry][0])
        depth = np.array([rng.choice([0, 0, 2, 5]) for _ in range(8)])
        before = depth.copy()
        expected = depth.tolist()
        query = rng.choice(prompts(1, rng.random()) + [p for _, p in live.values()] + [prompt])
        for slot, other in live.values():
            d = shared(query, other)
            # What is known of a replica is a lower bound of what it holds of this very prompt.
            if d > before[slot]:
                expected[slot] = max(expected[slot], d)
        raised = overlay.deepen(query, depth)
        assert depth.tolist() == expected
        assert raised == (expected != before.tolist())
        assert len(overlay) == len(live)


def test_a_burst_with_one_prefix_and_own_tails():
    overlay, prefix = InFlight(), np.arange(1, 251, dtype=np.uint64)
    for i in range(200):
        overlay.add(i % 3, np.concatenate([prefix, np.array([1000 + i], dtype=np.uint64)]))
    depth = np.zeros(64, dtype=np.int64)
    assert overlay.deepen(np.concatenate([prefix, np.array([7], dtype=np.uint64)]), depth)
    assert depth[:4].tolist() == [250, 250, 250, 0]


def test_every_entry_with_another_length():
    overlay, prompt = InFlight(), np.arange(1, 301, dtype=np.uint64)
    for slot in range(64):
        overlay.add(slot, prompt[: 1 + 4 * slot])
    depth = np.zeros(64, dtype=np.int64)
    assert overlay.deepen(prompt, depth)
    assert depth.tolist() == [1 + 4 * slot for slot in range(64)]


def test_memory_stays_bounded_and_entries_keep_their_hashes():
    overlay, rng = InFlight(), random.Random(0)
    live = {}
    for i in range(5000):
        hashes = np.full(rng.randint(1, 600), i, dtype=np.uint64)
        live[overlay.add(i % 16, hashes)] = hashes
        if len(live) > 50:
            entry = rng.choice(list(live))
            overlay.remove(entry)
            del live[entry]
    assert all((overlay.hashes(entry) == hashes).all() for entry, hashes in live.items())
    assert len(overlay._pool) <= 4 * 50 * 600
    for entry in list(overlay):
        overlay.remove(entry)
    assert (len(overlay), overlay._tail, overlay._live) == (0, 0, 0)


def test_an_empty_overlay_raises_nothing():
    depth = np.zeros(64, dtype=np.int64)
    assert not InFlight().deepen(np.arange(5, dtype=np.uint64), depth)
    assert not depth.any()
