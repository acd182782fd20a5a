"""What `warmroute simulate` predicts beside a live run: the demo's workload, replicas and policies, here.

    python benchmarks/simulate_vs_live.py

Prints a table, then one JSON object as the last line. First one engine alone is measured (`warmroute bench
engine`, threads as the replicas have). Then two CPU replicas serve the HTTP endpoint, and the demo's workload
is replayed against them once per policy, `--rounds` times in turns, from cold caches each time. The same
requests are simulated on a fleet with the measured step times; nothing else of what was measured goes into
the simulation. What is made equal:

- Requests: order, sessions and arrivals (the workload's clock, `--speed` times as fast). A turn of a session
  waits for the one before it.
- Tokens: prompts as `POST /tokenize` gives them, with the model's chat template; answers of full length
  (`ignore_eos`).
- Caches: as many blocks, of the same size, with the same eviction policy.

What stays different: live times are the client's, so HTTP, routing and tokenizing are in them, on the same
processors as the replicas. Live replicas keep answers in their caches, simulated ones do not; the next turn
of a session has a scripted answer in place of the model's, so only the end of a prompt is hit more live,
where prompt and answer filled a block together. Other programs must let the machine alone: `others` in the
JSON is how many processors they took during each live run and, as `engine_others`, while the engine was
measured.

Live figures are medians over the rounds. Whether the simulation orders policies as they are is asked only of
those that the live rounds tell apart: no round of the one is within the range of the other's.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from replica.config import EngineConfig
from router.cli.cluster import deployed, free_port, local_ray
from router.cli.demo import HOST, NUM_BLOCKS, POLICIES, REPLICAS
from router.cli.serve import default_threads
from router.config import AppConfig
from router.lab.client import Client, Sampling, Target
from router.lab.fitting import fitting_workload
from router.lab.modifiers import faster
from router.lab.replay import ReplayOptions, replay
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.timing import Timing

FIGURES = ("hit_rate", "ttft_mean_ms", "ttft_p50_ms", "e2e_mean_ms")


def bench_engine(model, file):
    """Figures of one engine that has the machine to itself, as `warmroute bench engine` writes them."""
    command = [sys.executable, "-m", "router.cli", "bench", "engine", "--model", model, "--json", file]
    subprocess.run([*command, "--threads", str(default_threads(REPLICAS))], check=True, stdout=sys.stderr)
    return json.loads(Path(file).read_text(encoding="utf-8"))


def run_live(options):
    """The requests that were sent, with their tokens, and the figures of every run by policy."""
    runs = {policy: [] for policy in POLICIES}
    port, known = free_port(HOST), None
    with local_ray(REPLICAS):
        for number in range(options.rounds):
            for policy in POLICIES:
                with deployed(app_config(options.model, policy), HOST, port) as url:
                    known = known or asyncio.run(workload(Target(url), options.limit))
                    runs[policy].append(measure(known[0], Target(url), options.speed, policy))
                say(f"round {number + 1}, {policy}: {runs[policy][-1]}")
    return known[1], runs


def app_config(model, policy):
    """Of an endpoint as the demo has it."""
    return AppConfig.model_validate(
        {"model": model, "policy": policy, "replicas": REPLICAS, "engine": engine_settings()}
    )


def engine_settings():
    """Of the demo's replicas."""
    return {"num_blocks": NUM_BLOCKS, "threads": default_threads(REPLICAS)}


async def workload(target, limit):
    """The demo's requests, and the same ones with tokens as prompts."""
    requests = (await fitting_workload(target, say))[:limit]
    return requests, await tokenized(requests, target)


def measure(requests, target, speed, policy):
    """One live run, from cold caches."""
    options = ReplayOptions(speed=speed, policy=policy, sampling=Sampling(ignore_eos=True))
    before = processor_s()
    report = asyncio.run(replay(requests, target, options))
    others = taken_by_others(before, processor_s())
    if report.errors:
        sys.exit(f"{policy}: {report.errors} {report.notes}")
    return {**figures(report.as_json()), "others": round(others, 2)}


async def tokenized(requests, target):
    """The same requests with the tokens that the endpoint makes of their prompts."""
    async with Client(target, 60.0) as client:
        model = await client.served_model()
        tokens = [await client.tokenize(request, model.name) for request in requests]
    return [
        replace(request, messages=None, text=None, tools=None, token_ids=ids)
        for request, ids in zip(requests, tokens, strict=True)
    ]


def simulate(requests, timing, policy, speed):
    """Figures of one policy on the simulated fleet."""
    engine = EngineConfig(**engine_settings())
    config = FleetConfig(
        replicas=REPLICAS,
        blocks=engine.num_blocks,
        block_size=engine.block_size,
        timing=timing,
        eviction=engine.eviction,
    )
    return figures(Fleet(config, policy).run(faster(requests, speed)).as_json())


def figures(report):
    """The compared ones, of the JSON of a replay or a simulated run."""
    ttft, e2e = report["ttft_ms"], report["e2e_ms"]
    return dict(zip(FIGURES, (report["hit_rate"], ttft["mean"], ttft["p50"], e2e["mean"]), strict=True))


def medians(runs):
    """Of each figure over several runs."""
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES}


def processor_s():
    """Wall time, processor time of the whole machine, and of this program and its descendants, seconds.

    Of children that have ended only what a waiting parent has got.
    """
    everything = psutil.cpu_times()
    busy = sum(everything) - everything.idle - getattr(everything, "iowait", 0.0)
    ours = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            ours += times.user + times.system + times.children_user + times.children_system
    return time.perf_counter(), busy, ours


def taken_by_others(before, after):
    """Processors that other programs kept busy between two `processor_s`, on average."""
    wall_s, busy_s, ours_s = (late - early for early, late in zip(before, after, strict=True))
    return max(0.0, busy_s - ours_s) / wall_s


def row(policy, live, simulated):
    """One line of the table."""
    points = 100 * (simulated["hit_rate"] - live["hit_rate"])
    return {"policy": policy, "live": live, "simulated": simulated, "difference_points": points}


def verdicts(rows, runs):
    """Whether the prediction was right: hit rates, and which policy is better than which."""
    return {
        "hit_rates_within_1_point": all(abs(line["difference_points"]) <= 1 for line in rows),
        "order_by_hit_rate": order(rows, runs, "hit_rate"),
        "order_by_mean_ttft": order(rows, runs, "ttft_mean_ms"),
    }


def order(rows, runs, name):
    """Pairs of policies, the lower figure first, by whether the simulation has them so, or the live rounds do
    not tell."""
    pairs = {"right": [], "wrong": [], "undecided": []}
    simulated = {line["policy"]: line["simulated"][name] for line in rows}
    live = {policy: [run[name] for run in some] for policy, some in runs.items()}
    for one, other in combinations(sorted(live, key=lambda policy: statistics.median(live[policy])), 2):
        decided = max(live[one]) < min(live[other])
        right = "right" if simulated[one] < simulated[other] else "wrong"
        pairs[right if decided else "undecided"].append([one, other])
    return pairs


def table(rows):
    shown = Table(title="Live / simulated", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("policy", "hit rate", "points", "TTFT ms", "p50", "E2E s"):
        shown.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for line in rows:
        sides = [line["live"], line["simulated"]]
        rates = " / ".join(f"{side['hit_rate']:.1%}" for side in sides)
        ttft, p50 = (" / ".join(f"{side[name]:,.0f}" for side in sides) for name in FIGURES[1:3])
        e2e = " / ".join(f"{side['e2e_mean_ms'] / 1000:.2f}" for side in sides)
        shown.add_row(line["policy"], rates, f"{line['difference_points']:+.2f}", ttft, p50, e2e)
    return shown


def say(line):
    print(line, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3, help="live runs of each policy, in turns")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="the workload's clock, so many times as fast"
    )
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    options = parser.parse_args()
    before = processor_s()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        engine = bench_engine(options.model, file.name)
        timing = Timing.named(file.name)
    others = round(taken_by_others(before, processor_s()), 2)
    requests, runs = run_live(options)
    rows = [
        row(policy, medians(runs[policy]), simulate(requests, timing, policy, options.speed))
        for policy in POLICIES
    ]
    Console().print(table(rows))
    measured = {"engine": engine, "engine_others": others, "rows": rows, "runs": runs}
    print(json.dumps({**vars(options), **measured, **verdicts(rows, runs)}))


if __name__ == "__main__":
    main()
