"""What each term of the default policy is worth: the same trace without it.

    python benchmarks/policy_ablation.py TRACE [--speed 1,4] [--limit 6000]

Simulates 8 replicas (H100, 8B; 2,000 blocks of 512 tokens) with cache_aware, once as it is and once with each
term changed, and prints a table, then one JSON object as the last line.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

import router.policy
from router.lab.commands import read_requests
from router.lab.modifiers import faster, in_time_order
from router.lab.record import Request
from router.lab.rows import TraceOptions
from router.lab.sim.fleet import Fleet, FleetConfig
from router.lab.sim.replica import SimReplica
from router.loads import Loads
from router.policy import CacheAware

_LOAD = SimReplica.load


def _without_attention(replica: SimReplica) -> dict[str, Any]:
    load = _LOAD(replica)
    return {**load, "attention_tokens": 0, "waiting_work": load["waiting_tokens"]}


VARIANTS: dict[str, Sequence[tuple[Any, str, Any]]] = {
    "as it is": (),
    "recomputing costs others nothing (BETA 1, CROWD 0, QUEUED 0)": (
        (router.policy, "BETA", 1.0),
        (router.policy, "CROWD", 0.0),
        (router.policy, "QUEUED", 0.0),
    ),
    "no eviction term (BETA 1)": ((router.policy, "BETA", 1.0),),
    "no crowd (CROWD 0)": ((router.policy, "CROWD", 0.0),),
    "queued requests count as others (QUEUED 0)": ((router.policy, "QUEUED", 0.0),),
    "free blocks count as others": ((Loads, "has_room", lambda self, blocks: blocks < 0),),
    "a coming copy is as good as a ready one": ((router.policy, "_coming", lambda s, pending: 0.0),),
    "attention costs nothing": ((SimReplica, "load", _without_attention),),
    "never computed anew beside a holder": ((CacheAware, "_has_waited_enough", lambda *_: False),),
    "siblings of a new prefix stay together": ((router.policy, "_is_new", lambda *_: False),),
    "no ages (equal costs at random)": (
        (Loads, "victim_ages", lambda self, slots, blocks, now: slots * 0.0),
    ),
}


@contextmanager
def changed(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Some attributes have other values meanwhile."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def run(requests: Sequence[Request], speed: float, variant: str) -> dict[str, Any]:
    """The figures of one simulation."""
    with changed(VARIANTS[variant]):
        figures = Fleet(FleetConfig(), "cache_aware").run(faster(requests, speed)).as_json()
    return {key: figures[key] for key in ("hit_rate", "ttft_ms", "e2e_ms", "imbalance")}


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--speed", default="1,4")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    requests = in_time_order(read_requests(options.trace, TraceOptions(), options.limit, False)[0])
    table = Table("cache_aware", "speed", "hit", "TTFT ms", "p50", "p99", "E2E ms")
    found = []
    for speed in map(float, options.speed.split(",")):
        for variant in VARIANTS:
            figures = run(requests, speed, variant)
            found.append({"variant": variant, "speed": speed, **figures})
            ttft = [f"{figures['ttft_ms'][key]:,.0f}" for key in ("mean", "p50", "p99")]
            table.add_row(
                variant,
                f"{speed:g}",
                f"{figures['hit_rate']:.2%}",
                *ttft,
                f"{figures['e2e_ms']['mean']:,.0f}",
            )
    Console().print(table)
    print(json.dumps({"trace": options.trace, "runs": found}))


if __name__ == "__main__":
    main()
