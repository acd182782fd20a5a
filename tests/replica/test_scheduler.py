"""What each step computes, on the real cache and without a model: exact plans."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from kvcore.cache import PrefixCache
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from replica.request import Request, SamplingParams
from replica.scheduler import Scheduler
from replica.sequence import build_sequences

NAMESPACE = Namespace("model", "layout")
BLOCK = 4


class Bench:
    """A scheduler and a stand-in for the engine that samples 1000, 1001, ... for whoever is ready."""

    def __init__(self, num_blocks=32, max_batch_tokens=16, max_num_seqs=8):
        self.hasher = PrefixHasher(b"secret")
        self.cache = PrefixCache(num_blocks, BLOCK, self.hasher)
        self.scheduler = Scheduler(self.cache, BLOCK, max_batch_tokens, max_num_seqs)
        self.orders = itertools.count()
        self.sampled = itertools.count(1000)

    def add(self, tokens, n=1, **request):
        prompt = np.array(tokens, dtype=np.int32)
        asked = Request("r", prompt, SamplingParams(n=n, max_tokens=99), **request)
        hashes = self.hasher.block_hashes(prompt, BLOCK, self.hasher.root(NAMESPACE))
        seqs = build_sequences(asked, NAMESPACE, hashes, 0, self.orders)
        self.scheduler.add(seqs[0])
        return seqs[0] if n == 1 else seqs

    def step(self):
        """One step; its plan as (order, start, count)."""
        plan = self.scheduler.schedule()
        self.plan = plan
        drawers = [seq for chunk in plan.chunks for seq in chunk.drawers]
        self.scheduler.complete(plan)
        for seq in drawers:
            seq.outputs.append(next(self.sampled))
        self.cache.check()
        return [(c.seq.order, c.start, c.count) for c in plan.chunks]

    def idle(self):
        stats = self.cache.stats()
        return stats.held == 0 and stats.free + stats.cached == stats.num_blocks


def test_the_scheduler_needs_no_torch():
    code = "import sys, replica.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_to_do_is_an_empty_plan():
    assert Bench().step() == []


def test_a_prompt_then_one_token_a_step():
    bench = Bench()
    seq = bench.add(range(6))
    assert bench.step() == [(0, 0, 6)]
    assert bench.step() == [(0, 6, 1)]
    assert bench.step() == [(0, 7, 1)]
    bench.scheduler.remove(seq)
    assert bench.step() == []
    assert bench.idle()


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    bench = Bench(max_batch_tokens=10)
    bench.add(range(25))
    assert [bench.step() for _ in range(4)] == [[(0, 0, 10)], [(0, 10, 10)], [(0, 20, 5)], [(0, 25, 1)]]


def test_decodes_come_first_and_the_rest_of_the_budget_is_prefill_in_order_of_arrival():
    bench = Bench(max_batch_tokens=10)
    bench.add(range(3))
    bench.step()
    bench.add(range(100, 112))
    bench.add(range(200, 205))
    assert bench.step() == [(0, 3, 1), (1, 0, 9)]
    assert bench.step() == [(0, 4, 1), (1, 9, 3), (2, 0, 5)]
    assert bench.step() == [(0, 5, 1), (1, 12, 1), (2, 5, 1)]


def test_short_prompts_share_half_the_step_and_the_oldest_keeps_the_other():
    bench = Bench(max_batch_tokens=16)
    bench.add(range(40))
    assert bench.step() == [(0, 0, 16)]
    bench.add(range(100, 106))
    bench.add(range(200, 203))
    bench.add(range(300, 309))
    assert bench.step() == [(2, 0, 3), (0, 16, 13)]  # 3 + 6 tokens are more than half
    assert bench.step() == [(2, 3, 1), (1, 0, 6), (0, 29, 9)]
    assert bench.step() == [(1, 6, 1), (2, 4, 1), (0, 38, 2), (3, 0, 9)]


def test_a_prompt_that_is_nearly_all_cached_overtakes_a_long_one():
    bench = Bench(max_batch_tokens=8)
    first = bench.add(range(12))
    assert [bench.step(), bench.step()] == [[(0, 0, 8)], [(0, 8, 4)]]
    bench.scheduler.remove(first)
    bench.add(range(100, 130))
    assert bench.step() == [(1, 0, 8)]
    bench.add(range(12))
    assert bench.step() == [(2, 11, 1), (1, 8, 7)]


def test_no_more_sequences_run_than_allowed():
    bench = Bench(max_num_seqs=2)
    first = bench.add([1])
    bench.add([2])
    bench.add([3])
    assert bench.step() == [(0, 0, 1), (1, 0, 1)]
    bench.scheduler.remove(first)
    assert bench.step() == [(1, 1, 1), (2, 0, 1)]


def test_a_cached_prefix_is_not_computed_again():
    bench = Bench()
    first = bench.add(range(10))
    bench.step()
    second = bench.add([*range(8), 90, 91, 92])
    assert bench.step() == [(0, 10, 1), (1, 8, 3)]
    assert second.lease.blocks[:2].tolist() == first.lease.blocks[:2].tolist()
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_a_whole_prompt_hit_computes_its_last_token():
    bench = Bench()
    bench.add(range(8))
    bench.step()
    seq = bench.add(range(8))
    assert bench.step() == [(0, 8, 1), (1, 7, 1)]
    assert seq.cached_tokens == 7


def test_a_hit_that_ends_inside_a_block_is_copied_before_the_step():
    bench = Bench()
    first = bench.add(range(8))
    bench.step()
    second = bench.add([*range(6), 90, 91])
    assert bench.step() == [(0, 8, 1), (1, 6, 2)]
    assert bench.plan.copies == [(int(first.lease.blocks[1]), int(second.lease.blocks[1]), 2)]
    bench.step()
    assert bench.plan.copies == []


def test_a_burst_on_a_new_prompt_computes_it_once():
    bench = Bench(max_batch_tokens=8)
    for last in (90, 91, 92):
        bench.add([*range(16), last])
    assert bench.step() == [(0, 0, 8)]
    assert bench.step() == [(0, 8, 8)]
    assert bench.step() == [(0, 16, 1), (1, 16, 1), (2, 16, 1)]


def test_who_waits_for_another_is_overtaken_by_who_need_not():
    bench = Bench(max_batch_tokens=8)
    bench.add(range(16))
    bench.add(range(16))
    bench.add([50, 51])
    assert bench.step() == [(2, 0, 2), (0, 0, 6)]
    assert bench.step() == [(2, 2, 1), (0, 6, 7)]
    bench = Bench(max_batch_tokens=18)
    bench.add(range(16))
    bench.add(range(16))
    bench.add([50, 51])
    assert bench.step() == [(2, 0, 2), (0, 0, 16)]
    assert bench.step() == [(0, 16, 1), (2, 2, 1), (1, 15, 1)]


def test_the_wait_ends_where_prompts_part():
    bench = Bench(max_batch_tokens=8)
    bench.add(range(16))
    bench.add([*range(4), *range(60, 70)])
    assert bench.step() == [(0, 0, 8)]  # block 0 is being computed
    # Block 1 of the second is nobody else's: it starts once the older one leaves budget.
    assert bench.step() == [(0, 8, 8)]
    assert bench.step() == [(0, 16, 1), (1, 4, 7)]


def test_who_waits_goes_on_when_the_other_is_aborted():
    bench = Bench(max_batch_tokens=8)
    first = bench.add(range(16))
    bench.add(range(16))
    bench.step()
    bench.scheduler.remove(first)
    assert bench.step() == [(1, 8, 8)]


def test_nobody_waits_for_blocks_that_will_not_be_published_or_may_not_be_read():
    bench = Bench(max_batch_tokens=32)
    bench.add(range(12), publish=False)
    bench.add(range(12))
    assert bench.step() == [(0, 0, 12), (1, 0, 12)]
    bench = Bench(max_batch_tokens=32)
    bench.add(range(12))
    bench.add(range(12), read=False)
    assert bench.step() == [(0, 0, 12), (1, 0, 12)]


@pytest.mark.parametrize("cached", [True, False])
def test_choices_of_one_prompt_compute_it_once_and_share_its_blocks(cached):
    bench = Bench()
    seqs = bench.add(range(10), n=3, read=cached, publish=cached)
    assert bench.scheduler.num_waiting == 3
    assert bench.step() == [(0, 0, 10)]
    assert [seq.outputs for seq in seqs] == [[1000], [1001], [1002]]
    shared = seqs[0].lease.blocks.tolist()
    assert [seq.lease.blocks.tolist() for seq in seqs] == [shared] * 3
    assert bench.scheduler.num_waiting == 0
    assert bench.step() == [(0, 10, 1), (1, 10, 1), (2, 10, 1)]
    # Each goes on in a block of its own, with the two tokens they shared.
    assert bench.plan.copies == [(shared[2], int(seq.lease.blocks[2]), 2) for seq in seqs]
    assert all(seq.lease.blocks[:2].tolist() == shared[:2] for seq in seqs)
    assert bench.cache.stats().held == 2 + 3
    bench.step()
    assert bench.plan.copies == []
    for seq in seqs:
        bench.scheduler.remove(seq)
    assert bench.idle()


def test_the_youngest_gives_way_when_blocks_run_out_and_comes_back_by_recompute():
    bench = Bench(num_blocks=5)
    old = bench.add(range(7))
    young = bench.add(range(50, 57))
    assert bench.step() == [(0, 0, 7), (1, 0, 7)]
    assert bench.step() == [(0, 7, 1), (1, 7, 1)]
    assert bench.step() == [(0, 8, 1)]  # both need a fifth block and there is one: the older has it
    assert bench.scheduler.preemptions == 1
    assert (young.lease, young.outputs) == (None, [1001, 1003])
    assert bench.step() == [(0, 9, 1)]
    bench.scheduler.remove(old)
    # Its first block is still cached; the rest, answer included, is computed again and the next token drawn.
    start = bench.step()
    assert start == [(1, start[0][1], 9 - start[0][1])]
    assert young.outputs[2:] == [1006]
    assert young.cached_tokens == 0
    assert bench.step() == [(1, 9, 1)]


def test_the_oldest_is_never_preempted_while_another_can_be():
    bench = Bench(num_blocks=6, max_num_seqs=4)
    seqs = [bench.add(range(50 * i, 50 * i + 3)) for i in range(4)]
    for _ in range(21):
        bench.step()
    assert seqs[0].num_tokens == 3 + 21
    assert [seq.lease is not None for seq in seqs] == [True, False, False, False]
    for seq in seqs:
        bench.scheduler.remove(seq)
    assert bench.idle()


def test_a_sequence_as_large_as_the_pool_runs_even_beside_a_partial_hit():
    bench = Bench(num_blocks=4)
    first = bench.add(range(8))
    bench.step()
    bench.scheduler.remove(first)
    # Needs all four blocks, one of which is the source of its partial hit.
    bench.add([*range(6), *range(60, 70)])
    [(order, start, count)] = bench.step()
    assert (order, start + count) == (0 + 1, 16)


def test_who_lacks_blocks_is_not_overtaken():
    bench = Bench(num_blocks=6)
    first = bench.add(range(14))
    bench.step()
    bench.add(range(100, 112))
    bench.add([7])
    assert bench.step() == [(0, 14, 1)]
    bench.scheduler.remove(first)
    assert bench.step() == [(2, 0, 1), (1, 0, 12)]


def test_tokens_still_to_compute():
    bench = Bench(max_batch_tokens=8)
    bench.add(range(20))
    bench.add(range(100, 110))
    assert sum(count for _, count in bench.scheduler.uncomputed_prompts()) == 30
    bench.step()
    assert sum(count for _, count in bench.scheduler.uncomputed_prompts()) == 22
    bench.step()
    bench.step()
    assert sum(count for _, count in bench.scheduler.uncomputed_prompts()) == 6
    bench.step()
    assert sum(count for _, count in bench.scheduler.uncomputed_prompts()) == 0
    bench.add([*range(20), 5])
    assert sum(count for _, count in bench.scheduler.uncomputed_prompts()) == 1


@pytest.mark.parametrize("stage", ["waiting", "first chunk", "decoding", "preempted"])
def test_removal_at_any_stage_leaves_nothing_behind(stage):
    bench = Bench(num_blocks=5, max_batch_tokens=8)
    other = bench.add(range(7))
    seq = bench.add(range(50, 57))
    for _ in range({"waiting": 0, "first chunk": 1, "decoding": 2, "preempted": 4}[stage]):
        bench.step()
    bench.scheduler.remove(seq)
    bench.scheduler.remove(seq)
    bench.cache.check()
    assert bench.step()
    bench.scheduler.remove(other)
    assert bench.idle()


# --- A step ahead of the running one. ---


def shape(plan):
    return [
        (chunk.seq.order, chunk.start, chunk.count, chunk.samples, chunk.carried) for chunk in plan.chunks
    ]


def test_a_step_ahead_goes_on_with_a_token_that_is_not_known_yet():
    bench = Bench()
    seq = bench.add(range(6))
    first = bench.scheduler.schedule()
    second = bench.scheduler.schedule(ahead=True)
    assert shape(first) == [(0, 0, 6, True, False)]
    assert shape(second) == [(0, 6, 1, True, True)]
    assert (seq.pending, seq.planned, seq.computed, seq.num_tokens) == (2, 7, 0, 6)
    assert seq.lease.tokens.tolist() == [0, 1, 2, 3, 4, 5, 0]
    bench.scheduler.complete(first)
    seq.outputs.append(77)
    bench.scheduler.settle(first.chunks[0], seq, 77)
    assert (seq.pending, seq.computed, seq.lease.tokens.tolist()) == (1, 6, [0, 1, 2, 3, 4, 5, 77])
    bench.scheduler.complete(second)
    seq.outputs.append(78)
    bench.scheduler.settle(second.chunks[0], seq, 78)
    assert (seq.pending, seq.computed, seq.remaining) == (0, 7, 1)
    assert bench.step() == [(0, 7, 1)]
    assert seq.lease.tokens.tolist() == [0, 1, 2, 3, 4, 5, 77, 78]


def test_a_prefill_goes_on_ahead_and_is_not_computed_twice_by_others():
    bench = Bench(max_batch_tokens=8)
    bench.add(range(20))
    first = bench.scheduler.schedule()
    bench.add([*range(12), 50])
    second = bench.scheduler.schedule(ahead=True)
    assert (shape(first), shape(second)) == ([(0, 0, 8, False, False)], [(0, 8, 8, False, False)])
    bench.scheduler.complete(first)
    bench.scheduler.complete(second)
    assert bench.step() == [(1, 12, 1), (0, 16, 4)]


def test_nothing_is_scheduled_beyond_the_last_token_of_an_answer():
    bench = Bench()
    seq = bench.add(range(6))
    seq.longest = 2
    plans = [bench.scheduler.schedule(), bench.scheduler.schedule(ahead=True)]
    assert [shape(plan)[0][1] for plan in plans] == [0, 6]
    assert (seq.remaining, bench.scheduler.schedule(ahead=True).chunks) == (0, [])


def test_nobody_loses_blocks_to_a_step_ahead():
    bench = Bench(num_blocks=4, max_batch_tokens=16)
    old, young = bench.add(range(8)), bench.add(range(100, 104))
    bench.step()  # three blocks are held; each of the two needs another one
    assert not bench.scheduler.can_go_ahead()
    assert [(order, start) for order, start, *_ in shape(bench.scheduler.schedule(ahead=True))] == [(0, 8)]
    assert (bench.scheduler.preemptions, old.pending, young.pending) == (0, 1, 0)


def test_who_is_removed_while_a_step_runs_is_left_alone():
    bench = Bench()
    seq, other = bench.add(range(6)), bench.add(range(100, 105))
    first = bench.scheduler.schedule()
    second = bench.scheduler.schedule(ahead=True)
    bench.scheduler.remove(seq)
    for plan in (first, second):
        bench.scheduler.complete(plan)
        bench.scheduler.settle(plan.chunks[0], seq, 5)
    bench.cache.check()
    assert (seq.pending, seq.computed, seq.lease, other.computed) == (0, 0, None, 6)
    bench.scheduler.remove(other)
    assert bench.idle()
