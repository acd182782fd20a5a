"""Simulated fleets: exact times in small cases, nothing lost in large ones, the same result every time."""

import json
from dataclasses import replace

import numpy as np
import pytest

from router.lab.blocks import Blocks
from router.lab.errors import OptionError
from router.lab.ideal import ideal_hits
from router.lab.record import Request
from router.lab.sim.changes import Change
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.policies import OTHERS, PLACED
from router.lab.sim.tiers import TierConfig
from router.lab.sim.timing import Timing

# A step takes 1 s at least; a token 1/8 s; attention nothing, reading a cached token 1/1024 s.
SIMPLE = Timing(0.0, 1.0, 0.125, 0.0, 2**-10, max_batch_tokens=32, max_num_seqs=4)


def request(at, tokens, answer, session=None):
    ids = np.arange(tokens) if isinstance(tokens, int) else np.array(tokens)
    return Request(token_ids=ids.astype(np.int32), max_tokens=answer, timestamp_s=at, session_id=session)


def fleet(policy="round_robin", **config):
    options = {"replicas": 1, "blocks": 64, "block_size": 4, "timing": SIMPLE, **config}
    return Fleet(FleetConfig(**options), policy)


def workload(seed, count=120):
    """Chats that grow, over a few system prompts, arriving faster than they are served."""
    rng, chats = np.random.default_rng(seed), {}
    for number in range(count):
        name = str(rng.integers(12))
        chats[name] = chats.get(name, [int(name) % 3] * 9) + rng.integers(3, 99, 7).tolist()
        if len(chats[name]) > 60:
            chats[name] = [int(name) % 3] * 9 + rng.integers(3, 99, 7).tolist()
        yield request(number * 0.7, chats[name], int(rng.integers(1, 9)), name)


def test_one_request_alone():
    found = fleet().run([request(5.0, 24, 3)])
    run = found.as_json()
    prefill = 24 * 0.125
    decodes = (1 + 24 / 1024) + (1 + 25 / 1024)
    assert run["ttft_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99"), 1000 * prefill)
    assert run["e2e_ms"]["mean"] == pytest.approx(1000 * (prefill + decodes))
    assert run["tpot_ms"]["mean"] == pytest.approx(1000 * decodes / 2)
    assert (run["hit_rate"], run["requests_per_replica"], run["imbalance"]) == (0.0, [1], 1.0)
    assert run["sim_seconds"] == pytest.approx(5 + prefill + decodes, abs=0.02)


def test_a_long_prompt_is_computed_in_chunks_and_hits_the_second_time():
    found = fleet().run([request(0.0, 72, 1), request(100.0, 72, 1)]).as_json()
    chunks = 32 * 0.125 + 32 * 0.125 + 1.0  # the last 8 tokens take the least that a step takes
    assert found["ttft_ms"]["mean"] == 1000 * (chunks + 1.0) / 2
    assert found["hit_rate"] == 71 / 144


def test_an_arrival_interrupts_a_run_of_decoding_at_the_next_step():
    first, second = request(0.0, 8, 100), request(10.5, 8, 1)
    run = fleet().run([first, second])
    # The first token comes at 1.0; then steps of 1 s and 1/1024 s for each cached token, from 8 on.
    times, now, context = [], 1.0, 8
    while now < 10.5:
        now, context = now + 1 + context / 1024, context + 1
        times.append(now)
    # Its hit leaves one token to compute, beside one decode.
    assert run.ttft_s == pytest.approx([now + 1 + context / 1024 - 10.5, 1.0])


def test_decoding_many_steps_at_once_takes_as_long_as_one_by_one():
    together = SIMPLE.decode(3, 50, 7)
    assert together == pytest.approx(sum(SIMPLE.decode(3, 50 + 3 * step) for step in range(7)))


@pytest.mark.parametrize("policy", [*PLACED, *OTHERS])
def test_everybody_is_served_and_everything_is_free_at_the_end(policy):
    requests = list(workload(3))
    one = fleet(policy, replicas=3, blocks=40)
    run = one.run(requests).as_json()
    assert (run["requests"], run["refused"]) == (len(requests), 0)
    assert sum(run["requests_per_replica"]) == len(requests)
    for replica in one.replicas:
        replica.cache.check()
        stats = replica.cache.stats()
        assert stats.free + stats.cached == 40 and stats.leases == 0
    again = fleet(policy, replicas=3, blocks=40).run(requests).as_json()
    for timed in ("wall_seconds", "decide_us"):
        del run[timed], again[timed]
    assert run == again, "deterministic"


def test_a_large_cache_hits_what_is_ideal():
    requests = list(workload(4))
    run = fleet(blocks=4000).run([request(1000.0 * i, r.known_tokens(), 1) for i, r in enumerate(requests)])
    ideal = sum(ideal_hits([r.known_tokens() for r in requests])) / sum(
        len(r.known_tokens()) for r in requests
    )
    # The last, partial block of a prompt is not published.
    assert ideal - 0.06 < run.hit_rate <= ideal


def test_cache_aware_beats_the_others_where_prefixes_repeat():
    requests = list(workload(5, 400))
    rates = {name: fleet(name, replicas=4, blocks=40).run(requests).hit_rate for name in PLACED}
    assert rates["cache_aware"] > max(rates["least_load"], rates["round_robin"]) + 0.04


@pytest.mark.parametrize("factor", [1.0, 1.02, 1.04])
def test_an_idle_fleet_of_nearly_equal_replicas_uses_all_its_caches(factor):
    """One request at a time, prompts that fit the fleet's caches and not one replica's, three rounds."""
    prompts = [np.arange(40) + 100 * number for number in range(24)]
    requests = [request(100.0 * i, prompts[i % 24], 1) for i in range(72)]
    one = fleet("cache_aware", replicas=2, blocks=160, speeds=(1 / factor, 1.0))
    run = one.run(requests)
    assert min(run.per_replica.values()) >= 18
    assert run.hit_rate == pytest.approx(2 / 3 * 39 / 40)


def test_a_session_stays_with_its_replica():
    requests = [request(float(i), [i % 5, i, i + 1], 1, str(i % 5)) for i in range(50)]
    one = fleet("session", replicas=4)
    seen = {}
    place = one.policy.place
    one.policy.place = lambda sim: seen.setdefault(sim.session, set()).add(found := place(sim)) or found
    one.run(requests)
    assert all(len(replicas) == 1 for replicas in seen.values()) and len(seen) == 5


def test_the_youngest_gives_way_when_blocks_run_out():
    one = fleet(blocks=12)
    run = one.run([request(0.0, range(16), 24), request(0.5, range(50, 66), 24)]).as_json()
    assert run["requests"] == 2 and one.replicas[0].preemptions > 0


def test_a_request_of_hash_ids_that_gave_way_hits_what_it_left():
    prompts = [Blocks.of([first, first + 1, first + 2, first + 3], 4, 16, own=1) for first in (1, 11)]
    one = fleet(blocks=12)
    one.run([Request(blocks=blocks, max_tokens=24, timestamp_s=0.5 * i) for i, blocks in enumerate(prompts)])
    assert one.replicas[0].preemptions > 0
    held = set(one.replicas[0].cache.snapshot().hashes.tolist())
    assert held <= {key for blocks in prompts for key in blocks.keys().tolist()}
    one.replicas[0].cache.check()


def test_what_tiers_gave_is_counted_once_for_a_request_that_moves():
    tiers = dict(timing=replace(SIMPLE, kv_bytes=1000), tiers=[TierConfig.parse("100:0.000008")])
    prompts = [range(100 * i, 100 * i + 16) for i in range(4)]
    requests = [request(100.0 * i, prompts[i % 4], 30) for i in range(5)]
    plain = fleet(blocks=12, **tiers).run(requests).as_json()
    again = [*requests, request(400.5, range(900, 916), 30)]  # too much for the pool: the youngest gives way
    one = fleet(blocks=12, **tiers)
    run = one.run(again).as_json()
    assert one.replicas[0].preemptions > 0
    assert (
        plain["loaded_rate"] == plain["hit_rate"] == 15 / 80
        and run["loaded_rate"] == run["hit_rate"] == 15 / 96
    )


def test_slow_replicas_and_late_events():
    requests = list(workload(6))
    fast = fleet("cache_aware", replicas=4).run(requests)
    half = fleet("cache_aware", replicas=4, speeds=(0.5, 0.5, 1.0, 1.0)).run(requests)
    assert np.mean(half.ttft_s) > np.mean(fast.ttft_s)
    assert half.per_replica[0] + half.per_replica[1] < half.per_replica[2] + half.per_replica[3]
    late = fleet("cache_aware", replicas=4, routers=4, event_delay_s=5.0).run(requests)
    assert late.hit_rate <= fast.hit_rate


def test_what_no_replica_can_hold_is_refused():
    run = fleet(blocks=4).run([request(0.0, 17, 1), request(1.0, 15, 1)]).as_json()
    assert (run["requests"], run["refused"]) == (1, 1)


def test_a_turn_that_is_refused_does_not_end_its_session():
    # A prompt that nobody holds is not even built: it would take 8 GB.
    huge = Request(blocks=Blocks.of([], 4, 2**31 - 1, own=1), timestamp_s=0.0, session_id="a")
    run = fleet().run([huge, request(5.0, 16, 1, "a")])
    assert (run.refused, run.ttft_s) == (1, [2.0])


def test_presets_follow_from_peak_rates():
    timing = Timing.preset("h100-8b")
    assert timing.weights_s == 2 * 8.03e9 / (3.35e12 * 0.8)
    assert timing.token_s == 2 * 8.03e9 / (989e12 * 0.5)
    assert timing.kv_s == 131_072 / (3.35e12 * 0.8), "128 KiB of keys and values a token"
    four = Timing.preset("h100-8b-tp4")
    assert four.token_s == timing.token_s / 4 and four.step_s == timing.step_s
    assert timing.slower(2).decode(1, 10) == 2 * timing.decode(1, 10)


def measured(tokens, cached, decodes, context, ms):
    """A step in the JSON of `warmroute bench engine`."""
    return {
        "prefill_tokens": tokens,
        "cached_tokens": cached,
        "decodes": decodes,
        "context_tokens": context,
        "ms": ms,
    }


STEPS = [
    measured(32, 0, 0, 0, 20 + 32 * 1.5 + 512 * 0.001),
    measured(512, 0, 0, 0, 20 + 512 * 1.5 + 131_072 * 0.001),
    measured(512, 1000, 0, 0, 20 + 512 * 1.5 + 643_072 * 0.001),
    measured(0, 0, 1, 20, 20 + 1.5 + 20 * 0.01),
    measured(0, 0, 8, 9000, 20 + 8 * 1.5 + 9000 * 0.01),
]
"""20 ms a step, 1.5 a token, a thousandth a pair, a hundredth a token of context."""


def test_a_timing_is_fitted_to_a_benchmark(tmp_path):
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"steps": STEPS}))
    timing = Timing.named(str(file))
    assert (timing.step_s, timing.token_s) == (pytest.approx(0.02), pytest.approx(0.0015))
    assert (timing.pair_s, timing.kv_s) == (pytest.approx(1e-6), pytest.approx(1e-5))
    assert timing.prefill(100, 5000, 4, 800) == pytest.approx(0.02 + 104 * 0.0015 + 0.005 + 0.008)
    for text in ("", "[]", "{}", '{"prefill_tokens_per_s": 1}', '{"steps": [{}]}', '{"steps": 3}'):
        file.write_text(text)
        with pytest.raises(OptionError, match="no JSON of `warmroute bench engine`"):
            Timing.named(str(file))


def test_a_fitted_timing_has_no_cost_below_nothing():
    flat = [{**step, "ms": 20 + 1.5 * (step["prefill_tokens"] + step["decodes"])} for step in STEPS]
    flat[-1]["ms"] -= 5  # contexts would make it faster
    timing = Timing.fitted(flat)
    assert min(timing.step_s, timing.token_s, timing.pair_s, timing.kv_s) == 0
    assert timing.token_s == pytest.approx(0.0015, rel=0.1)


@pytest.mark.parametrize(
    "steps", [STEPS[:3], [{**step, "ms": 0.0} for step in STEPS], [{**step, "decodes": -9} for step in STEPS]]
)
def test_steps_that_tell_nothing(steps):
    with pytest.raises(OptionError, match="at least 4 steps"):
        Timing.fitted(steps)


@pytest.mark.parametrize("name", ["", "h100", "h100-9b", "tpu-8b", "h100-8b-tpx"])
def test_unknown_timings(name):
    with pytest.raises(OptionError, match="unknown timing"):
        Timing.preset(name)


def test_refusals():
    with pytest.raises(OptionError, match="known: cache_aware"):
        fleet("best")
    with pytest.raises(OptionError, match="positive"):
        FleetConfig(replicas=0)
    with pytest.raises(OptionError, match="speeds"):
        FleetConfig(speeds=(1.0, 0.0))
    with pytest.raises(OptionError, match="no replica 3 is there at 1 s to fail"):
        fleet(changes=[Change.parse("fail:3@1")])
    with pytest.raises(OptionError, match="no replica 0 is there at 2 s to leave"):
        fleet(changes=[Change.parse("leave:0@2"), Change.parse("fail:0@1")])


@pytest.mark.parametrize("text", ["", "fail@3", "fail:x@3", "join:1@3", "leave:1", "leave:1@-1", "stop:1@2"])
def test_changes_that_mean_nothing(text):
    with pytest.raises(OptionError, match="a change is"):
        Change.parse(text)


@pytest.mark.parametrize("text", ["", "8", "8:", "0:1", "8:0", "8:inf", "x:1"])
def test_tiers_that_mean_nothing(text):
    with pytest.raises(OptionError, match="a tier"):
        TierConfig.parse(text)


def test_text_counts_four_bytes_as_a_token():
    run = fleet().run([Request(text="x" * 96, max_tokens=1, timestamp_s=0.0)])
    assert run.ttft_s == [24 * 0.125]


def test_a_turn_waits_for_the_one_before_it():
    turns = [request(0.0, 16, 3, "a"), request(1.0, 24, 1, "a"), request(50.0, 32, 1, "a")]
    turns.append(replace(request(50.5, 40, 1, "a"), think_s=3.0))
    one = fleet()
    arrived = []
    place = one.policy.place
    one.policy.place = lambda sim: arrived.append(one.now) or place(sim)
    one.run(turns)
    first = 16 * 0.125 + (1 + 16 / 1024) + (1 + 17 / 1024)
    third = 50.0 + 8 * 0.125  # 24 of 32 tokens are cached
    assert arrived == pytest.approx([0.0, first, 50.0, third + 3.0])


def test_a_replica_that_fails_loses_its_cache_and_its_requests_go_on_elsewhere():
    requests = [request(0.0, 16, 30), request(0.5, 16, 1)]
    change = Change.parse("fail:0@5")
    run = fleet("least_load", replicas=2, changes=[change]).run(requests)
    assert run.moved in (0, 1) and len(run.ttft_s) == 2
    one = fleet("round_robin", replicas=2, changes=[change, Change.parse("join@6")])
    run = one.run([*requests, request(7.0, 16, 1), request(20.0, 16, 1)])
    assert run.moved == 1 and run.as_json()["requests"] == 4
    # Two steps at 2 s and about 3 s were done there; 18 tokens are computed again at the other, which has 15
    # of them; the client waited for no first token again.
    assert run.per_replica == {1: 3, 2: 1} or run.per_replica == {1: 2, 2: 2}
    assert not one.replicas[0].requests and one.replicas[0].due is None


def test_a_replica_that_leaves_answers_what_it_has():
    one = fleet("round_robin", replicas=2, changes=[Change.parse("leave:0@1")])
    run = one.run([request(0.0, 16, 9), request(2.0, 16, 1), request(3.0, 16, 1)])
    assert run.per_replica == {0: 1, 1: 2} and run.moved == 0


def test_nobody_is_left():
    one = fleet(changes=[Change.parse("fail:0@1")])
    run = one.run([request(0.0, 16, 9), request(2.0, 16, 1)]).as_json()
    assert (run["requests"], run["refused"], run["moved"]) == (0, 2, 0)


def test_lower_tiers_give_back_what_was_evicted():
    tiers = dict(timing=replace(SIMPLE, kv_bytes=1000), tiers=[TierConfig.parse("100:0.000008")])
    prompts = [range(100 * i, 100 * i + 16) for i in range(4)]
    requests = [request(100.0 * i, prompts[i % 4], 1) for i in range(5)]
    measures = fleet(blocks=12, **tiers).run(requests)
    run = measures.as_json()
    assert run["loaded_rate"] == 15 / 80 and run["hit_rate"] == 15 / 80
    # Four blocks of 4 tokens of 1,000 bytes at 8,000 bytes/s, then the last token.
    assert measures.ttft_s == pytest.approx([2.0, 2.0, 2.0, 2.0, 3.0])
    assert fleet(blocks=12).run(requests).hit_rate == 0.0


def test_short_prompts_overtake_long_ones():
    requests = [request(0.0, 60, 1), request(0.1, range(100, 112), 1), request(0.2, range(200, 204), 1)]
    express = fleet().run(requests)
    fcfs = fleet(express=False).run(requests)
    assert express.ttft_s != fcfs.ttft_s and sum(express.ttft_s) < sum(fcfs.ttft_s)


def test_a_burst_for_one_prefix_computes_it_once():
    requests = [request(0.0, [*range(24), 100 + i], 1) for i in range(4)]
    run = fleet().run(requests)
    assert run.hit_rate == 3 * 24 / 100
