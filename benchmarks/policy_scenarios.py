"""The default policy where there is nothing to gain: is it ever worse than least load?

    python benchmarks/policy_scenarios.py [--sharegpt sharegpt_tokens.jsonl.gz] [--seeds 3]

Simulates 8 replicas (H100, 8B; 4,000 blocks of 64 tokens) at light, medium and heavy load, with cache_aware
and least_load, on: prompts that share nothing; one hot prefix for all; a burst of 200 siblings of a new
prefix; a mix of everything; the same where half of the replicas are half as fast; and ShareGPT's tokens.
Prints mean TTFT and E2E of both, medians over seeds, and one JSON object as the last line.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from router.lab.blocks import Blocks
from router.lab.commands import read_requests
from router.lab.modifiers import faster, in_time_order
from router.lab.record import Request
from router.lab.rows import TraceOptions
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.synth import preset, synthesize_trace

SIZE = 64
FLEET = FleetConfig(replicas=8, blocks=4000, block_size=SIZE)
SLOW = replace(FLEET, speeds=(1.0, 0.5))
LOADS = {"light": 0.25, "medium": 0.6, "heavy": 0.9}
CAPACITY = {"random": 90.0, "shared": 160.0, "mixed": 40.0}
"""Requests per second that fill the fleet, about; measured by looking where queues begin to grow."""

Workload = Callable[[float, int], Sequence[Request]]


def synthetic(kind: str, share: float = 1.0) -> Workload:
    """A workload of `trace synth`, at a load from 0 to 1."""

    def make(load: float, seed: int) -> Sequence[Request]:
        rate = CAPACITY[kind] * load * share
        config = preset(kind, rate=rate, requests=3000, seed=seed, block_size=SIZE)
        return [_request(row, number) for number, row in enumerate(synthesize_trace(config), 1)]

    return make


def burst(load: float, seed: int) -> Sequence[Request]:
    """200 prompts of the same 8,192 new tokens and 60 own ones come within a second, others around them."""
    background = list(synthetic("random")(load, seed))[: int(90 * load * 20)] if load else []
    rng = np.random.default_rng(seed)
    size, shared = 200, list(range(10**6, 10**6 + 128))
    siblings = [
        Request(
            blocks=Blocks.of([*shared, 2 * 10**6 + number], SIZE, 128 * SIZE + 60, number + 1),
            max_tokens=200,
            timestamp_s=10 + float(at),
        )
        for number, at in enumerate(np.sort(rng.random(size)))
    ]
    return in_time_order([*background, *siblings])


def cold_burst(load: float, seed: int) -> Sequence[Request]:
    """The siblings alone, on an idle fleet with empty caches; the higher the load the shorter the burst."""
    start = {0.25: 4.0, 0.6: 1.0, 0.9: 0.01}[load]
    siblings = [request for request in burst(0.0, seed) if request.num_tokens == 128 * SIZE + 60]
    return [replace(request, timestamp_s=((request.timestamp_s or 10) - 10) * start) for request in siblings]


def _request(row: dict[str, Any], number: int) -> Request:
    delay = row.get("delay")
    return Request(
        blocks=Blocks.of(row["hash_ids"], SIZE, row["input_length"], number),
        max_tokens=row["output_length"],
        timestamp_s=row["timestamp"] / 1000,
        session_id=row.get("session_id"),
        think_s=None if delay is None else delay / 1000,
    )


def scenarios(sharegpt: str | None) -> Iterator[tuple[str, Workload, FleetConfig]]:
    """Name, workload and fleet of each."""
    yield "nothing shared", synthetic("random"), FLEET
    yield "one hot prefix", synthetic("shared"), FLEET
    yield "burst of 200 siblings, busy fleet", burst, FLEET
    yield "burst of 200 siblings, cold fleet", cold_burst, FLEET
    yield "mixed", synthetic("mixed"), FLEET
    yield "nothing shared, half the replicas slow", synthetic("random", 0.75), SLOW
    yield "mixed, half the replicas slow", synthetic("mixed", 0.75), SLOW
    if sharegpt is not None:
        read = in_time_order(read_requests(sharegpt, TraceOptions(), None, False)[0])
        span_s = read[-1].timestamp_s or 1.0
        yield "ShareGPT tokens", lambda load, _: list(faster(read, 90 * load * span_s / len(read))), FLEET


def measure(requests: Sequence[Request], config: FleetConfig, policy: str) -> dict[str, float]:
    """Means of one run."""
    figures = Fleet(config, policy).run(requests).as_json()
    return {
        "hit_rate": figures["hit_rate"],
        "ttft_ms": figures["ttft_ms"]["mean"],
        "e2e_ms": figures["e2e_ms"]["mean"],
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sharegpt", help="ShareGPT requests with token ids (JSONL)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="scenarios whose names contain this")
    options = parser.parse_args()
    table = Table(
        "scenario", "load", "hit", "TTFT ms", "least load", "ratio", "E2E ms", "least load", "ratio"
    )
    found = []
    for name, make, config in scenarios(options.sharegpt):
        if options.only and options.only not in name:
            continue
        for load, share in LOADS.items():
            pairs = []
            for seed in range(options.seeds):
                requests = make(share, seed)
                pairs.append(
                    [measure(requests, replace(config, seed=seed), p) for p in ("cache_aware", "least_load")]
                )
            ours, theirs = (medians(runs) for runs in zip(*pairs, strict=True))
            ratios = {key: ours[key] / theirs[key] for key in ("ttft_ms", "e2e_ms")}
            found.append(
                {"scenario": name, "load": load, "cache_aware": ours, "least_load": theirs, "ratios": ratios}
            )
            cells = [f"{ours['hit_rate']:.1%}"]
            for key in ("ttft_ms", "e2e_ms"):
                cells += [f"{ours[key]:,.0f}", f"{theirs[key]:,.0f}", f"{ratios[key]:.3f}"]
            table.add_row(name, load, *cells)
            print(name, load, *cells, flush=True)
    Console().print(table)
    print(json.dumps({"runs": found}))


if __name__ == "__main__":
    main()
