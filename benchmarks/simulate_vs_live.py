"""`warmroute simulate`'s prediction beside a live run: the demo's workload, replicas and policies on this machine.

    python benchmarks/simulate_vs_live.py

Needs a machine with nothing else to do: `load` in the JSON says how busy it was. Prints a table, then one JSON
object as the last line. It measures one engine alone (`warmroute bench engine`, threads as the replicas have),
serves two CPU replicas behind the HTTP endpoint and replays the demo's workload against them once per policy,
`--rounds` times in turns, each time from cold caches; and simulates the same requests on a fleet with these step
times. Nothing that the live run measured goes into the simulation. What is made equal:

- Requests: order, sessions, and arrivals (the workload's clock, divided by `--speed`). Later turns of a session
  wait for the one before on both sides.
- Tokens: prompts as `POST /tokenize` gives them, with the model's chat template; answers have their full length
  (`ignore_eos`).
- Caches: as many blocks of the same size, the same eviction policy.

Live figures are medians over the rounds. Live times are those of the client, so HTTP, routing, and rendering and
tokenizing the prompt are in them, and all of that takes processor time from the replicas; the simulation knows
only steps.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

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
TOLERANCE_POINTS = 1.0
"""How far the simulated hit rate may be from the live one."""


def bench_engine(model, file):
    """Figures of one engine that has the machine to itself, as `warmroute bench engine` writes them."""
    command = [sys.executable, "-m", "router.cli", "bench", "engine", "--model", model, "--json", file]
    subprocess.run([*command, "--threads", str(default_threads(REPLICAS))], check=True, stdout=sys.stderr)
    return json.loads(Path(file).read_text(encoding="utf-8"))


def run_live(model, options):
    """The requests that were sent, with their tokens, and the report of every run by policy."""
    reports = {policy: [] for policy in POLICIES}
    port, requests = free_port(HOST), None
    with local_ray(REPLICAS):
        for number in range(options.rounds):
            for policy in POLICIES:
                config = AppConfig.model_validate(
                    {"model": model, "policy": policy, "replicas": REPLICAS, "engine": engine_settings()}
                )
                with deployed(config, HOST, port) as url:
                    workload = asyncio.run(fitting_workload(Target(url), say))[: options.limit]
                    requests = requests or asyncio.run(tokenized(workload, Target(url)))
                    say(f"round {number + 1}: {policy}, {len(workload)} requests ...")
                    report = asyncio.run(replay(workload, Target(url), replay_options(options, policy)))
                if report.errors:
                    sys.exit(f"{policy}: {report.errors} {report.notes}")
                reports[policy].append(report)
    return requests, reports


def engine_settings():
    """Of the demo's replicas."""
    return {"num_blocks": NUM_BLOCKS, "threads": default_threads(REPLICAS)}


def replay_options(options, policy):
    return ReplayOptions(speed=options.speed, policy=policy, sampling=Sampling(ignore_eos=True))


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


def say(line):
    print(line, file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=2, help="live runs of each policy, in turns")
    parser.add_argument("--speed", type=float, default=1.0, help="the workload's clock, so many times as fast")
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument("--bench", help="use this JSON of `bench engine`, do not measure")
    parser.add_argument("--dump")
    options = parser.parse_args()
    requests, reports = run_live(options.model, options)
    import pickle
    pickle.dump((requests, {p: [(r.as_json(), list(r.outcomes)) for r in rs] for p, rs in reports.items()}), open(options.dump, "wb"))


if __name__ == "__main__":
    main()
