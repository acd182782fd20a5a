"""Why a prompt hits as far as it does: each reason, with the exact hit."""

import dataclasses

import numpy as np
import pytest

from kvcore.explain import Explanation
from kvcore.namespace import Namespace


def seq(*tokens):
    return np.array(tokens, dtype=np.int32)


def span(start, stop):
    return np.arange(start, stop, dtype=np.int32)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], Explanation(0, 0, "complete")),
        ([0], Explanation(1, 0, "complete")),
        (range(8), Explanation(8, 7, "complete")),
        (range(9), Explanation(9, 8, "complete")),
        ([*range(8), 1, 2], Explanation(10, 8, "short")),
        ([*range(8), 1, 2, 3, 4], Explanation(12, 8, "unseen")),
        ([0, 1, 2, 3, 4, 5, 9, 9, 9], Explanation(9, 6, "differs")),
        ([0, 1, 2, 3, 4, 9, 9], Explanation(7, 5, "differs")),
        ([0, 1, 9, 9, 9], Explanation(5, 2, "differs")),
        ([0, 1, 9], Explanation(3, 2, "complete")),
        ([9, 9, 9, 9, 9], Explanation(5, 0, "unseen")),
        ([9, 9], Explanation(2, 0, "short")),
    ],
)
def test_reasons_beside_one_prompt_of_two_blocks(cache, ns, run, tokens, expected):
    run(cache, range(8), ns)
    assert cache.explain(seq(*tokens), ns) == expected


def test_uncommitted(cache, ns):
    lease = cache.claim(span(0, 12), ns)
    reasons = [cache.explain(span(0, 13), ns)]
    for computed in (4, 7, 8):
        cache.commit(lease, computed)
        reasons.append(cache.explain(span(0, 13), ns))
    assert reasons == [Explanation(13, hit, "uncommitted") for hit in (0, 4, 4, 8)]
    cache.commit(lease, 12)
    assert cache.explain(span(0, 13), ns) == Explanation(13, 12, "complete")


def test_a_sequence_that_will_not_publish_the_block_is_no_reason(cache, ns):
    cache.claim(span(0, 8), ns, publish=False)
    cache.claim(span(0, 3), ns)
    cache.claim(span(0, 8), Namespace("other"))
    assert cache.explain(span(0, 9), ns) == Explanation(9, 0, "unseen")
    lease = cache.claim(span(0, 8), ns)
    cache.clear()
    assert cache.explain(span(0, 9), ns) == Explanation(9, 0, "unseen")
    cache.release(lease)


def test_evicted_and_how_long_ago(make_cache, ns, run, clock):
    cache = make_cache(num_blocks=20)
    run(cache, range(8), ns)
    clock.now = 10.0
    run(cache, range(100, 176), ns)
    assert cache.explain(span(0, 13), ns) == Explanation(13, 4, "evicted", 0.0)
    clock.now = 22.5
    assert cache.explain(span(0, 13), ns) == Explanation(13, 4, "evicted", 12.5)


def test_an_eviction_long_ago_is_forgotten(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    assert cache._state.pool.ghosts.shape == (1, 4), "it remembers four"
    run(cache, range(4), ns)
    for start in range(100, 120, 4):
        assert cache.explain(span(0, 5), ns).reason in ("complete", "evicted")
        run(cache, range(start, start + 4), ns)
    for start in range(200, 212, 4):
        assert cache.explain(span(0, 5), ns).reason == "evicted"
        run(cache, range(start, start + 4), ns)
    assert cache.explain(span(0, 5), ns).reason == "unseen"


def test_what_was_stored_again_is_no_longer_an_eviction(make_cache, ns, run):
    cache = make_cache(num_blocks=4)
    run(cache, range(4), ns)
    run(cache, range(100, 116), ns)
    cache.release(cache.claim(span(0, 5), ns))
    assert cache.explain(span(0, 5), ns).reason == "evicted", "asking alone brings nothing back"
    run(cache, range(5), ns)
    cache.clear()
    assert cache.explain(span(0, 5), ns).reason == "unseen"


def test_another_namespace_holds_it(cache, ns, run):
    run(cache, range(8), Namespace("m", salt="hunter2"))
    found = cache.explain(span(0, 9), ns)
    assert found == Explanation(9, 0, "namespace") and "hunter2" not in repr(found)
    run(cache, range(4), ns)
    assert cache.explain(span(0, 9), ns) == Explanation(9, 4, "namespace")
    assert cache.explain(seq(0, 1, 2, 3, 9, 9, 9, 9, 9), ns) == Explanation(9, 4, "unseen")


def test_to_explain_changes_nothing(make_cache, ns, run, victims, clock):
    cache = make_cache(num_blocks=8)
    run(cache, range(16), ns)
    run(cache, range(50, 70), ns)
    clock.now = 5.0
    before, order, seq_before = cache.stats(), victims(cache), cache.seq
    for prompt in (span(0, 17), span(50, 71), span(90, 99), seq(0, 1, 9, 9, 9)):
        cache.explain(prompt, ns)
        cache.explain(prompt, Namespace("never seen"))
    assert (cache.stats(), victims(cache), cache.seq) == (before, order, seq_before)
    cache.check()


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Explanation(1, 0, "complete").reason = "short"
