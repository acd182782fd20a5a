"""What simulated routers hear: read late or at once, it leads to the same decisions."""

import numpy as np
import pytest

from router.lab.record import Request
from router.lab.sim.changes import Change
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.timing import Timing

TIMING = Timing(0.0, 0.02, 0.001, 1e-6, 1e-6, max_batch_tokens=32, max_num_seqs=8)
CHANGES = tuple(map(Change.parse, ("fail:1@12", "join@20", "leave:0@30")))


class Eager(Fleet):
    """Its routers read each report as it comes."""

    def _hear(self, number, report):
        super()._hear(number, report)
        self._read(number)


def requests(count=300):
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 99, 90) for _ in range(12)]
    for number in range(count):
        prompt = prompts[int(rng.integers(12))][: int(rng.integers(10, 90))]
        tokens = np.concatenate((prompt, rng.integers(0, 99, int(rng.integers(1, 40))))).astype(np.int32)
        answer = int(rng.integers(1, 30))
        yield Request(token_ids=tokens, max_tokens=answer, timestamp_s=number * 0.1)


@pytest.mark.parametrize("policy", ["cache_aware", "least_load", "dynamo", "llmd"])
@pytest.mark.parametrize("changes", [(), CHANGES])
def test_reports_that_nobody_reads_change_nothing(policy, changes):
    config = FleetConfig(3, 60, 4, TIMING, routers=2, event_delay_s=0.03, speeds=(1.0, 0.6), changes=changes)
    runs, heard = [], []
    for kind in (Fleet, Eager):
        one, calls = kind(config, policy), []
        take_in = one.policy.heard
        one.policy.heard = lambda *news, calls=calls, take_in=take_in: calls.append(news) or take_in(*news)
        run = one.run(list(requests())).as_json()
        del run["wall_seconds"], run["decide_us"]
        runs.append((run, one.measures.ttft_s, [replica.cache.stats() for replica in one.replicas]))
        heard.append(len(calls))
    assert runs[0] == runs[1]
    assert heard[0] < heard[1]
