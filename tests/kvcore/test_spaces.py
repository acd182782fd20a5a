"""Numbers of namespaces: given once, forgotten with the last user, reused; the list of them grows."""

from kvcore import eviction
from kvcore.spaces import Spaces


def leave(spaces, pool, space):
    eviction.leave_space(pool, space)
    spaces.forget_unused(pool)


def test_numbers_are_reused_after_the_last_user(make_cache):
    spaces, pool = Spaces(), make_cache()._state.pool
    for digest, number in ((b"a", 0), (b"b", 1), (b"a", 0)):
        space, pool = spaces.enter(pool, digest)
        assert space == number
        pool.spaces["users"][space] += 1
    assert sorted(spaces) == [(b"a", 0), (b"b", 1)] and spaces.digest(1) == b"b"
    leave(spaces, pool, 0)
    assert (spaces.find(b"a"), len(spaces)) == (0, 2), "one user is left"
    leave(spaces, pool, 0)
    assert (spaces.find(b"a"), spaces.find(b"b"), len(spaces)) == (-1, 1, 1)
    space, pool = spaces.enter(pool, b"c")
    assert space == 0 and spaces.digest(0) == b"c"
    assert pool.spaces["users"][0] == 0 and pool.spaces["child"][0] == -1


def test_several_are_forgotten_at_once(make_cache):
    spaces, pool = Spaces(), make_cache()._state.pool
    for number in range(5):
        space, pool = spaces.enter(pool, bytes([number]))
        pool.spaces["users"][space] = 1
    for number in (3, 1, 4):
        eviction.leave_space(pool, number)
    spaces.forget_unused(pool)
    assert sorted(number for _, number in spaces) == [0, 2]
    assert pool.state["unused_space"][0] == -1


def test_the_list_grows_and_keeps_what_it_knows(make_cache):
    spaces, pool = Spaces(), make_cache()._state.pool
    for number in range(40):
        before = pool
        space, pool = spaces.enter(pool, bytes([number]))
        assert space == number
        pool.spaces["users"][space] = number + 1
        pool.spaces["child"][space] = 2 * number
        if pool is not before:
            assert (before.spaces["child"] == -1).all(), "whoever still reads the old list finds no tree"
    assert len(pool.spaces) == 64 and pool.spaces.dtype == before.spaces.dtype
    assert pool.spaces["users"][:40].tolist() == list(range(1, 41))
    assert pool.spaces["child"][:40].tolist() == list(range(0, 80, 2))
