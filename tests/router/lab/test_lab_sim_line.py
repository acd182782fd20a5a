"""The waiting line of a simulated replica: a hit that nothing has changed is not looked up again."""

import numpy as np
import pytest

from kvcore.cache import PrefixCache
from router.lab.sim.line import Line
from router.lab.sim.request import HASHER, SPACE, SimRequest

BLOCK = 4
ATTENTION = 0.01


def request(tokens):
    array = np.array(tokens, np.int32)
    return SimRequest(array, HASHER.block_hashes(array, BLOCK, HASHER.root(SPACE)), 1, 0.0)


class Watched(PrefixCache):
    """Counts the times that somebody looks."""

    probes = 0

    def probe(self, *args):
        self.probes += 1
        return super().probe(*args)


def store(cache, tokens):
    lease = cache.claim(np.array(tokens, np.int32), SPACE)
    cache.commit(lease, len(tokens))
    cache.release(lease)


def test_only_what_may_have_changed_is_looked_up_again():
    cache = Watched(8, BLOCK, HASHER)
    line = Line(cache, ATTENTION)
    one, other = request([*range(8), 100]), request([50, 51, 52, 53, 54])
    store(cache, range(4))
    line.append(one)
    line.append(other)
    assert (one.hit, other.hit, cache.probes) == (4, 0, 2)
    store(cache, [0, 1, 2, 3, 9, 9, 9, 9])  # behind the first one's hit, but not its block
    assert [r.hit for r in line.first(2)] == [4, 0] and cache.probes == 3
    store(cache, [50, 51, 52, 53])
    assert [r.hit for r in line.first(2)] == [4, 4] and cache.probes == 4
    store(cache, [0, 1, 2, 3, 9, 9, 9, 9, 7, 7, 7, 7])  # elsewhere
    assert [r.hit for r in line.first(2)] == [4, 4] and cache.probes == 4
    cache.clear()
    assert [r.hit for r in line.first(1)] == [0]
    assert (other.hit, cache.probes) == (4, 5), "nobody has asked for it"


def test_what_is_left_is_summed_up():
    line = Line(PrefixCache(8, BLOCK, HASHER), ATTENTION)
    assert (line.tokens, line.work, len(line)) == (0, 0, 0)
    one, other, back = request(range(8)), request(range(6)), request(range(3))
    line.append(one)
    line.append(other)
    line.put_back(back)
    assert line.requests == [back, one, other] and line.tokens == 17
    assert line.work == sum(n * (1 + (n - n / 2) * ATTENTION) for n in (3, 8, 6))
    line.remove(one)
    assert (line.tokens, line.leave(), line.tokens, line.work) == (9, [back, other], 0, 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("blocks", [12, 60])
def test_hits_are_those_of_a_cache_that_is_asked_each_time(seed, blocks):
    rng = np.random.default_rng(seed)
    cache = Watched(blocks, BLOCK, HASHER)
    line, asked = Line(cache, ATTENTION), 0
    for _ in range(400):
        tokens = rng.integers(0, 2, int(rng.integers(1, 20))).repeat(2)  # few beginnings, shared by many
        if len(line) < 20:
            line.append(request(tokens))
        elif rng.random() < 0.3:
            line.remove(line.requests[int(rng.integers(20))])
        if rng.random() < 0.5:
            store(cache, tokens)
        if rng.random() < 0.01:
            cache.clear()
        for waiting in line.first(int(rng.integers(20))):
            assert waiting.hit == PrefixCache.probe(cache, waiting.tokens, SPACE, waiting.hashes)
            asked += 1
        assert line.tokens == sum(waiting.left() for waiting in line)
    assert cache.probes < asked
