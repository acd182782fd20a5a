"""Fingerprints against the replicas' own filters, and against every kind of bad update."""

from dataclasses import replace

import numpy as np
import pytest

from kvcore.fingerprint import CountingFilter, FilterGeometry, FingerprintUpdate, column_digest
from router.fingerprints import Fingerprints

GEOMETRY = FilterGeometry(4096)


class Source:
    """A replica's side: a counting filter that publishes snapshots and deltas."""

    def __init__(self, geometry=GEOMETRY, epoch=7):
        self.filter, self.epoch, self.seq = CountingFilter(geometry), epoch, 0

    def snapshot(self):
        rows = self.filter.set_rows.astype(np.uint32)
        geometry = self.filter.geometry
        return FingerprintUpdate(self.epoch, 0, self.seq, geometry, True, rows, self.filter.digest)

    def change(self, add=(), remove=()):
        added = self.filter.add(np.array(add, dtype=np.uint64))
        removed = self.filter.remove(np.array(remove, dtype=np.uint64))
        self.seq += 1
        return FingerprintUpdate(
            self.epoch, self.seq - 1, self.seq, self.filter.geometry, False,
            np.setdiff1d(added, removed).astype(np.uint32), self.filter.digest,
            np.setdiff1d(removed, added).astype(np.uint32),
        )  # fmt: skip


def keys(n, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 64, n, dtype=np.uint64)


def joined(*names):
    fingerprints = Fingerprints()
    for name in names:
        fingerprints.join(name)
    return fingerprints


def test_depth_at_every_replica():
    fingerprints, prompt = joined("a", "b", "c", "d"), keys(40)
    for name, depth in (("a", 0), ("b", 1), ("c", 25), ("d", 40)):
        source = Source()
        source.filter.add(prompt[:depth])
        assert fingerprints.apply(name, source.snapshot())
    depths = fingerprints.match(prompt)
    assert depths.shape == (64,)
    assert depths[:4].tolist() == [0, 1, 25, 40]
    assert not depths[4:].any()


def test_a_hole_ends_the_match_and_later_blocks_do_not_count():
    fingerprints, prompt, source = joined("a"), keys(10), Source()
    source.filter.add(prompt[[0, 1, 3, 4, 5]])
    fingerprints.apply("a", source.snapshot())
    assert fingerprints.match(prompt)[0] == 2
    assert fingerprints.match(prompt[3:])[0] == 3
    assert fingerprints.match(prompt[2:])[0] == 0


def test_empty_prompt_matches_nothing():
    assert not joined("a").match(np.empty(0, dtype=np.uint64)).any()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 511, 512, 513, 1500])
@pytest.mark.parametrize("replicas", [3, 130, 700])
def test_agrees_with_the_filters_themselves(length, replicas):
    """Same depth as asking every replica's filter block by block, whatever the words and chunks."""
    rng = np.random.default_rng(length + replicas)
    fingerprints, prompt = joined(*map(str, range(replicas))), keys(length, 1)
    true = np.zeros(replicas, dtype=np.int64)
    holders = rng.choice(replicas, min(replicas, 40), replace=False)
    for replica in holders:
        source = Source(FilterGeometry(int(rng.choice([2048, 8192, 16384]))))
        source.filter.add(np.concatenate([prompt[: rng.integers(0, length + 1)], keys(200, int(replica))]))
        assert fingerprints.apply(str(replica), source.snapshot())
        held = source.filter.bits_at(source.filter.geometry.rows_of(prompt)).all(axis=1)
        true[replica] = length if held.all() else held.argmin()
    assert fingerprints.match(prompt)[:replicas].tolist() == true.tolist()


def test_deltas_follow_the_replica():
    fingerprints, source, prompt = joined("a"), Source(), keys(20)
    assert fingerprints.apply("a", source.snapshot())
    assert fingerprints.apply("a", source.change(add=prompt))
    assert fingerprints.match(prompt)[0] == 20
    assert fingerprints.apply("a", source.change(remove=prompt[12:]))
    assert fingerprints.match(prompt)[0] == 12
    assert fingerprints.set_rows("a").tolist() == source.filter.set_rows.tolist()
    assert column_digest(fingerprints.set_rows("a")) == source.filter.digest
    assert fingerprints.position("a") == (7, 2)
    stats = fingerprints.stats("a")
    assert stats.set_rows == len(source.filter.set_rows)
    assert (stats.gaps, stats.mismatches, stats.snapshots) == (0, 0, 1)


def test_lost_repeated_and_reordered_updates_are_gaps_until_a_snapshot():
    fingerprints, source, prompt = joined("a"), Source(), keys(30)
    fingerprints.apply("a", source.snapshot())
    first, second, third = (source.change(add=prompt[i : i + 10]) for i in (0, 10, 20))
    assert fingerprints.apply("a", first)
    assert not fingerprints.apply("a", third)  # second was lost
    assert fingerprints.position("a") == (None, 0)
    assert not fingerprints.apply("a", second)  # nothing but a snapshot helps now
    assert fingerprints.apply("a", source.snapshot())
    assert fingerprints.match(prompt)[0] == 30
    assert not fingerprints.apply("a", third)  # repeated
    assert fingerprints.stats("a").gaps == 3


def test_an_older_snapshot_is_refused():
    fingerprints, source, prompt = joined("a"), Source(), keys(5)
    old = source.snapshot()
    fingerprints.apply("a", old)
    fingerprints.apply("a", source.change(add=prompt))
    assert not fingerprints.apply("a", old)
    assert fingerprints.match(prompt)[0] == 5


def test_a_restarted_replica_is_cold_at_once():
    fingerprints, source, prompt = joined("a"), Source(epoch=1), keys(5)
    source.filter.add(prompt)
    fingerprints.apply("a", source.snapshot())
    assert not fingerprints.apply("a", Source(epoch=2).change(add=prompt[:1]))
    assert fingerprints.match(prompt)[0] == 0
    assert fingerprints.apply("a", Source(epoch=2).snapshot())


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_wrong_digest_wipes_the_column(snapshot):
    fingerprints, source, prompt = joined("a", "b"), Source(), keys(5)
    source.filter.add(prompt)
    fingerprints.apply("a", source.snapshot())
    fingerprints.apply("b", source.snapshot())
    update = source.snapshot() if snapshot else source.change(add=keys(3, 9))
    assert not fingerprints.apply("a", replace(update, digest=update.digest ^ 1))
    assert fingerprints.match(prompt)[:2].tolist() == [0, 5]
    assert fingerprints.position("a") == (None, 0)
    assert len(fingerprints.set_rows("a")) == 0
    assert fingerprints.stats("a").mismatches == 1
    assert fingerprints.apply("a", source.snapshot())


def test_rows_outside_the_filter_are_refused():
    fingerprints = joined("a")
    rows = np.array([5, GEOMETRY.rows], dtype=np.uint32)
    assert not fingerprints.apply("a", FingerprintUpdate(1, 0, 1, GEOMETRY, True, rows, column_digest(rows)))
    assert fingerprints.stats("a").mismatches == 1


def test_unknown_replicas_are_refused():
    fingerprints = Fingerprints()
    assert not fingerprints.apply("nobody", Source().snapshot())
    fingerprints.leave("nobody")
    with pytest.raises(KeyError):
        fingerprints.slot("nobody")


def test_a_larger_filter_tiles_the_smaller_ones_and_leaves_them_whole():
    fingerprints, prompt = joined("small", "large"), keys(50)
    small, large = Source(FilterGeometry(1024)), Source(FilterGeometry(1 << 15))
    small.filter.add(prompt[:7])
    large.filter.add(prompt[:33])
    fingerprints.apply("small", small.snapshot())
    fingerprints.apply("large", large.snapshot())
    assert fingerprints.match(prompt)[:2].tolist() == [7, 33]
    assert fingerprints.apply("small", small.change(add=prompt[7:9]))
    assert fingerprints.match(prompt)[0] == 9
    assert fingerprints.apply("small", small.change(remove=prompt[1:9]))
    assert fingerprints.match(prompt)[0] == 1
    assert fingerprints.nbytes == 8 << 15
    fingerprints.leave("large")
    assert fingerprints.nbytes == 8 << 10
    assert fingerprints.match(prompt)[0] == 1


def test_filters_with_fewer_hashes_narrow_the_match_for_all():
    fingerprints, prompt = joined("two", "four"), keys(20)
    for name, hashes in (("two", 2), ("four", 4)):
        source = Source(FilterGeometry(1 << 14, hashes))
        source.filter.add(prompt[:11])
        fingerprints.apply(name, source.snapshot())
    assert fingerprints.match(prompt)[:2].tolist() == [11, 11]


def test_a_replica_may_come_back_with_another_geometry():
    fingerprints, prompt = joined("a"), keys(20)
    for rows in (4096, 1024, 8192):
        source = Source(FilterGeometry(rows), epoch=rows)
        source.filter.add(prompt[:5])
        assert fingerprints.apply("a", source.snapshot())
        assert fingerprints.match(prompt)[0] == 5
        assert fingerprints.set_rows("a").tolist() == source.filter.set_rows.tolist()


def test_wipe_forgets_one_replica_only():
    fingerprints, source, prompt = joined("a", "b"), Source(), keys(5)
    source.filter.add(prompt)
    for name in "ab":
        fingerprints.apply(name, source.snapshot())
    fingerprints.wipe("a")
    assert fingerprints.match(prompt)[:2].tolist() == [0, 5]


def test_thousand_joins_and_leaves_leave_no_bit_and_no_growth():
    fingerprints, prompt, source = joined("stays"), keys(30), Source()
    source.filter.add(prompt)
    fingerprints.apply("stays", source.snapshot())
    rng = np.random.default_rng(0)
    sizes, present = set(), []
    for i in range(1000):
        fingerprints.join(f"r{i}")
        fingerprints.apply(f"r{i}", source.snapshot())
        present.append(f"r{i}")
        if len(present) == 100:
            rng.shuffle(present)
            while len(present) > 40:
                fingerprints.leave(present.pop())
        sizes.add(fingerprints.nbytes)
    assert max(sizes) == 2 * 8 * GEOMETRY.rows
    for name in present:
        fingerprints.leave(name)
    assert fingerprints.match(prompt).nonzero()[0].tolist() == [fingerprints.slot("stays")]
    fingerprints.leave("stays")
    assert not fingerprints._matrix.any()
    assert fingerprints.capacity <= 128


def test_many_replicas_leave_and_the_matrix_shrinks():
    fingerprints = joined(*map(str, range(1024)))
    assert fingerprints.capacity == 1024
    for i in range(1, 1024):
        fingerprints.leave(str(i))
    assert fingerprints.capacity == 1024  # nobody had bits: nothing to move
    source = Source()
    fingerprints.apply("0", source.snapshot())
    fingerprints.join("x")
    fingerprints.apply("x", source.snapshot())
    fingerprints.leave("x")
    assert fingerprints.capacity == 128
    assert [fingerprints.join(str(i)) for i in range(1, 200)] == list(range(1, 200))


def test_staleness_by_the_clock():
    now = [100.0]
    fingerprints = Fingerprints(clock=lambda: now[0])
    fingerprints.join("a")
    now[0] = 103.0
    assert fingerprints.stats("a").age_s == 3.0
    fingerprints.apply("a", Source().snapshot())
    assert fingerprints.stats("a").age_s == 0.0


def test_overestimate_of_a_full_cache_is_tiny():
    blocks = 4096
    fingerprints, rng = joined("a"), np.random.default_rng(3)
    source = Source(FilterGeometry.for_blocks(blocks))
    prompts = rng.integers(0, 1 << 64, (128, 64), dtype=np.uint64)
    source.filter.add(np.concatenate([prompts[:, :32].ravel()]))
    fingerprints.apply("a", source.snapshot())
    over = [int(fingerprints.match(p)[0]) - 32 for p in prompts]
    assert min(over) >= 0
    assert sum(over) / len(over) < 0.2
