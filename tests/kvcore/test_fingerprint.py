"""Filters, their digest, and updates on the wire."""

import msgpack
import numpy as np
import pytest

from kvcore.errors import InvalidRequest, WireError
from kvcore.fingerprint import (
    CountingFilter,
    FilterGeometry,
    FingerprintUpdate,
    column_digest,
)


def words(*values):
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize(
    ("blocks", "rows"),
    [(1, 8), (2, 16), (3, 32), (100, 1024), (2000, 16384), (2048, 16384), (100_000, 1 << 20)],
)
def test_geometry_for_a_number_of_blocks(blocks, rows):
    geometry = FilterGeometry.for_blocks(blocks)
    assert (geometry.rows, geometry.hashes) == (rows, 4)
    assert 8 <= rows / blocks < 16


@pytest.mark.parametrize("arguments", [(7,), (12,), (4,), (1 << 32,), (0,), (64, 0), (64, 17)])
def test_wrong_geometries_are_refused(arguments):
    with pytest.raises(InvalidRequest):
        FilterGeometry(*arguments)
    with pytest.raises(InvalidRequest):
        FilterGeometry.for_blocks(0)


def test_rows_follow_the_formula():
    geometry = FilterGeometry(1024, 4)
    keys = words(0, 1, 5 << 32 | 3, 6 << 32 | 3, 2**64 - 1)
    expected = [
        [((key & 0xFFFFFFFF) + k * (key >> 32 | 1)) % 1024 for k in range(4)] for key in keys.tolist()
    ]
    rows = geometry.rows_of(keys)
    assert rows.tolist() == expected and rows.dtype == np.int64
    assert expected[2] == [3, 8, 13, 18] and expected[3] == [3, 10, 17, 24]
    assert geometry.rows_of(words()).shape == (0, 4)


def test_rows_of_a_smaller_filter_are_the_rows_modulo_its_size():
    keys = np.random.default_rng(0).integers(0, 2**64, 100, dtype=np.uint64)
    large, small = FilterGeometry(4096).rows_of(keys), FilterGeometry(64).rows_of(keys)
    assert np.array_equal(large % 64, small)


def finalizer(z):
    mask = (1 << 64) - 1
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def test_digest_follows_the_formula():
    rows = [1, 2, 77, 2**31 - 1]
    expected = sum(finalizer(row) for row in rows) % (1 << 64)
    for dtype in (np.int64, np.uint32, np.uint64):
        assert column_digest(np.array(rows, dtype=dtype)) == expected
    assert column_digest(np.array([], dtype=np.int64)) == 0
    assert column_digest(np.array([1])) == 0x5692161D100B05E5


def test_counting_filter_counts():
    counting = CountingFilter(FilterGeometry(64, 2))
    first, second = words(1 << 32 | 5), words(3 << 32 | 5)  # rows 5, 6 and 5, 8
    assert counting.add(first).tolist() == [5, 6]
    assert counting.add(second).tolist() == [8]
    assert counting.set_rows.tolist() == [5, 6, 8]
    assert counting.digest == column_digest(np.array([5, 6, 8]))
    assert counting.remove(first).tolist() == [6]
    assert np.flatnonzero(counting.bits_at(np.arange(64))).tolist() == [5, 8]
    assert counting.digest == column_digest(np.array([5, 8]))
    assert counting.clear().tolist() == [5, 8]
    assert counting.digest == 0 and not counting.bits_at(np.arange(64)).any()


def test_removing_what_was_never_added_is_refused_and_changes_nothing():
    counting = CountingFilter(FilterGeometry(64, 2))
    counting.add(words(1 << 32 | 5))
    with pytest.raises(InvalidRequest):
        counting.remove(words(1 << 32 | 5, 1 << 32 | 9))
    assert counting.set_rows.tolist() == [5, 6] and counting.digest == column_digest(np.array([5, 6]))


def test_counters_do_not_overflow():
    counting = CountingFilter(FilterGeometry(8, 1))
    same = np.zeros(65_535, dtype=np.uint64)
    counting.add(same)
    with pytest.raises(InvalidRequest):
        counting.add(words(0))
    assert counting.remove(same).tolist() == [0]


def test_false_positives_are_rare():
    geometry = FilterGeometry.for_blocks(2000)
    rng = np.random.default_rng(1)
    counting = CountingFilter(geometry)
    counting.add(rng.integers(0, 2**64, 2000, dtype=np.uint64))
    strangers = geometry.rows_of(rng.integers(0, 2**64, 20_000, dtype=np.uint64))
    assert counting.bits_at(strangers).all(axis=1).mean() < 0.03


# --- Updates on the wire ---


def update(**changes):
    fields = {
        "epoch": 2**63 + 5,
        "base_seq": 3,
        "seq": 9,
        "geometry": FilterGeometry(64),
        "snapshot": False,
        "set_rows": np.array([1, 63], dtype=np.uint32),
        "digest": 2**64 - 1,
        "cleared_rows": np.array([0, 7, 8], dtype=np.uint32),
    }
    return FingerprintUpdate(**{**fields, **changes})


def same(one, other):
    assert one.set_rows.tolist() == other.set_rows.tolist() and one.set_rows.dtype == np.uint32
    assert one.cleared_rows.tolist() == other.cleared_rows.tolist()
    assert one.geometry == other.geometry and one.snapshot is other.snapshot
    for name in ("epoch", "base_seq", "seq", "digest"):
        assert getattr(one, name) == getattr(other, name)


def test_a_delta_survives_the_wire():
    same(FingerprintUpdate.decode(update().encode()), update())


@pytest.mark.parametrize("rows", [[], [5], list(range(64)), [0, 8, 9, 63]])
def test_a_snapshot_survives_the_wire(rows):
    full = update(
        snapshot=True, set_rows=np.array(rows, dtype=np.uint32), cleared_rows=np.array([], dtype=np.uint32)
    )
    same(FingerprintUpdate.decode(full.encode()), full)


def test_a_full_column_travels_as_a_bitmap():
    rows = np.arange(0, 1 << 16, 2, dtype=np.uint32)
    full = FingerprintUpdate(1, 0, 1, FilterGeometry(1 << 16), True, rows, column_digest(rows))
    assert 8192 < len(full.encode()) < 8192 + 100
    same(FingerprintUpdate.decode(full.encode()), full)


GOOD = msgpack.unpackb(update().encode())


@pytest.mark.parametrize(
    "change",
    [
        {"v": 0},
        {"rows": 65},
        {"rows": "64"},
        {"k": 0},
        {"snap": 1},
        {"snap": True},
        {"epoch": -1},
        {"seq": None},
        {"base": 1.0},
        {"digest": b"1"},
        {"set": b"123"},
        {"set": np.array([64], dtype="<u4").tobytes()},
        {"set": np.array([5, 5], dtype="<u4").tobytes()},
        {"clr": np.array([6, 5], dtype="<u4").tobytes()},
        {"map": b"1234567"},
        {"map": 5},
    ],
)
def test_wrong_updates_are_refused(change):
    FingerprintUpdate.decode(msgpack.packb(GOOD))
    with pytest.raises(WireError):
        FingerprintUpdate.decode(msgpack.packb({**GOOD, **change}))


def test_every_truncation_of_an_update_is_refused():
    data = update().encode()
    for length in range(len(data)):
        with pytest.raises(WireError):
            FingerprintUpdate.decode(data[:length])


# --- The feed ---
