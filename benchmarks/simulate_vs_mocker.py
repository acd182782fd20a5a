"""`warmroute simulate`'s fleet beside NVIDIA Dynamo's mocker replay: same trace, arrivals, engine and run.

    python -m venv dynamo && dynamo/bin/pip install ai-dynamo-runtime==1.6.1
    python benchmarks/simulate_vs_mocker.py TRACE --dynamo dynamo/bin/python

Prints a table, then one JSON object as the last line. Times are simulated ones. What is made equal:

- Arrivals: the trace as our reader gives it, ticks spread, is written to a temporary file for the mocker.
- Engine: the mocker's vLLM backend with its defaults (chunked prefill, 8,192 tokens and 256 sequences a
  step, LRU), here `--eviction lru` with `MockerTiming`, which is the mocker's polynomial in our steps.
- Router: defaults on both sides; KV events reach it when the step ends.

What stays different, because the simulator has no option for it: the mocker keeps the full blocks of answers
in its cache, where nobody asks for them again, and takes blocks chunk by chunk; here answers are not
published and an admitted prompt has all its blocks at once. `--answer-tokens 1` takes both away from both
sides. Equal costs are settled at random on both sides, so kv_router and dynamo run `--repeats` times.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from router.lab.commands import read_requests
from router.lab.modifiers import faster, in_time_order
from router.lab.rows import TraceOptions
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.timing import Timing

PAIRS = {"round_robin": "round_robin", "kv_router": "dynamo"}
"""The mocker's router modes and our names for the same."""
MOCKER_SIDE = Path(__file__).with_name("mocker_replay.py")
DYNAMO_VERSION = "1.6.1"
POLYNOMIAL_DECODE_MS = (5.74, 54.01, -25.74)
"""A decode step by the share of the KV capacity that its contexts take, at most 1."""
POLYNOMIAL_PREFILL_MS = (16.50142, 1.518344e-2, 4.209989e-7)
"""The prefill of a step by the tokens that it computes."""


@dataclass(frozen=True)
class MockerTiming(Timing):
    """The mocker's default timing (aisimulate, crates/core/src/engine/common/perf_model.rs): a step is a
    prefill and then a decode, whatever each has to do, of `capacity` tokens of KV."""

    capacity: int = 1

    def prefill(self, tokens, pairs, decodes, context):
        constant, linear, square = POLYNOMIAL_PREFILL_MS
        prefill_s = (constant + linear * tokens + square * tokens * tokens) / 1000
        return prefill_s + self.decode(decodes, context)

    def decode(self, rows, context, steps=1):
        constant, linear, square = POLYNOMIAL_DECODE_MS
        growing = min(steps, max(0, -(-(self.capacity - context) // rows))) if rows else steps
        first, each, n = context / self.capacity, rows / self.capacity, growing
        shares = n * first + each * n * (n - 1) / 2
        squares = n * first**2 + first * each * n * (n - 1) + each**2 * (n - 1) * n * (2 * n - 1) / 6
        full = steps - growing
        return (steps * constant + linear * (shares + full) + square * (squares + full)) / 1000


def mocker_timing(engine):
    """Our timing from the mocker's engine settings."""
    return MockerTiming(
        step_s=0.0,
        weights_s=0.0,
        token_s=POLYNOMIAL_PREFILL_MS[1] / 1000,
        pair_s=0.0,
        kv_s=0.0,
        max_batch_tokens=engine["max_num_batched_tokens"],
        max_num_seqs=engine["max_num_seqs"],
        capacity=engine["num_gpu_blocks"] * engine["block_size"],
    )


def read(path, answer_tokens):
    """The requests in the order of their times, ticks spread."""
    requests = in_time_order(read_requests(path, TraceOptions(), None, False)[0])
    if any(request.blocks is None for request in requests):
        sys.exit("the mocker needs a trace with hash ids")
    if answer_tokens:
        requests = [replace(request, max_tokens=answer_tokens) for request in requests]
    return requests


def write(requests, file):
    """The same requests as the mocker reads them: Mooncake's format, milliseconds with fractions."""
    names = defaultdict(lambda: len(names))  # own blocks have negative ids here
    for request in requests:
        row = {
            "timestamp": request.timestamp_s * 1000,
            "input_length": request.num_tokens,
            "output_length": request.max_tokens or 1,
            "hash_ids": [names[block] for block in request.blocks.ids.tolist()],
        }
        file.write(json.dumps(row) + "\n")
    file.flush()


def run_mocker(requests, options, runs):
    """Dynamo's side, in its own interpreter."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        write(requests, file)
        order = {
            "trace": file.name,
            "workers": options.replicas,
            "trace_block_size": requests[0].blocks.size,
            "engine": {
                "backend": "vllm",
                "num_gpu_blocks": options.blocks,
                "block_size": options.block_size,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": 256,
            },
            "runs": runs,
        }
        done = subprocess.run(
            [options.dynamo, str(MOCKER_SIDE)],
            input=json.dumps(order),
            env={**os.environ, "DYN_LOG": "error"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def run_ours(requests, options, timing, mode, speed, seed):
    """One run of our simulator."""
    config = FleetConfig(
        replicas=options.replicas,
        blocks=options.blocks,
        block_size=options.block_size,
        timing=timing,
        event_delay_s=0.0,
        tell_interval_s=0.0,
        express=False,
        eviction="lru",
        seed=seed,
    )
    figures = Fleet(config, PAIRS[mode]).run(faster(requests, speed)).as_json()
    if figures["refused"]:
        sys.exit(f"{figures['refused']} prompts do not fit a replica; the mocker would compute them")
    times = {name: figures[name]["mean"] for name in ("ttft_ms", "e2e_ms")}
    return {"requests": figures["requests"], "hit_rate": figures["hit_rate"], **times}


def summary(runs):
    """Means of runs that differ by chance alone, and the range of their hit rates."""
    means = {name: statistics.fmean(run[name] for run in runs) for name in ("hit_rate", "ttft_ms", "e2e_ms")}
    rates = [run["hit_rate"] for run in runs]
    return {"runs": len(runs), **means, "hit_rate_range": [min(rates), max(rates)]}


def compare(requests, options):
    """All runs of both sides, a row per policy and speed."""
    speeds = [float(speed) for speed in options.speed.split(",")]
    repeats = {"round_robin": 1, "kv_router": options.repeats}
    plan = [(mode, speed, seed) for speed in speeds for mode in PAIRS for seed in range(repeats[mode])]
    theirs = run_mocker(requests, options, [[mode, speed] for mode, speed, _ in plan])
    if theirs["version"] != DYNAMO_VERSION:
        print(
            f"warning: this timing is that of {DYNAMO_VERSION}, not of {theirs['version']}", file=sys.stderr
        )
    timing = mocker_timing(theirs["engine"])
    sides = defaultdict(lambda: ([], []))
    for (mode, speed, seed), mocker in zip(plan, theirs["runs"], strict=True):
        ours = run_ours(requests, options, timing, mode, speed, seed)
        if ours["requests"] != mocker["requests"]:
            sys.exit(f"the mocker served {mocker['requests']} requests, we {ours['requests']}")
        sides[mode, speed][0].append(mocker)
        sides[mode, speed][1].append(ours)
    return theirs["version"], [row(*key, *map(summary, both)) for key, both in sides.items()]


def row(mode, speed, mocker, ours):
    """One line of the table."""
    points = 100 * (ours["hit_rate"] - mocker["hit_rate"])
    return {"policy": mode, "speed": speed, "mocker": mocker, "warmroute": ours, "difference_points": points}


def table(rows):
    shown = Table(title="Hit rate of the simulated fleets; times are simulated")
    for name in ("policy", "speed", "mocker", "warmroute", "points", "TTFT ms", "E2E s"):
        shown.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for line in rows:
        mocker, ours = line["mocker"], line["warmroute"]
        ttft = " / ".join(f"{side['ttft_ms']:.0f}" for side in (mocker, ours))
        e2e = " / ".join(f"{side['e2e_ms'] / 1000:.2f}" for side in (mocker, ours))
        rates = [f"{side['hit_rate']:.2%}" for side in (mocker, ours)]
        points = f"{line['difference_points']:+.2f}"
        shown.add_row(line["policy"], f"{line['speed']:g}", *rates, points, ttft, e2e)
    return shown


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="a trace with hash ids, plain or gzip")
    parser.add_argument("--dynamo", required=True, help="a Python interpreter that has ai-dynamo-runtime")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2000, help="KV blocks of each replica")
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--speed", default="1,4", help="arrivals, this many times as fast")
    parser.add_argument("--repeats", type=int, default=3, help="runs of kv_router and dynamo")
    parser.add_argument("--answer-tokens", type=int, help="length of all answers (default: the trace's)")
    options = parser.parse_args()
    version, rows = compare(read(options.trace, options.answer_tokens), options)
    Console().print(table(rows))
    print(json.dumps({"ai_dynamo_runtime": version, **vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
