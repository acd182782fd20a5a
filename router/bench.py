"""`warmroute bench route`: what one routing decision costs, on a fleet with full caches.

Every replica holds 100,000 blocks. Prompts begin with one of a few shared system prompts, held by half of
the fleet or more, and go on with a history that a few replicas hold to different depths; every replica
reports some load and has two requests in flight. Timed on one core: hashing the tokens, matching, and the
whole decision.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from kvcore.fingerprint import CountingFilter, FilterGeometry, FingerprintUpdate, column_digest
from kvcore.hashing import PrefixHasher
from kvcore.namespace import Namespace
from router.placement import Placement

_BASES = 16  # distinct cache contents that the replicas share, so that a large fleet is built in seconds
_SYSTEMS = 8  # system prompts
_PROMPTS = 128
_WARM_UP = 50

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RouteBench:
    """Size of the fleet and of the prompts."""

    replicas: int = 64
    tokens: int = 8192
    blocks: int = 100_000
    """Resident blocks per replica."""
    block_size: int = 16
    decisions: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class RouteResult:
    """Medians in microseconds, unless said otherwise."""

    replicas: int
    tokens: int
    blocks: int
    hash_us: float
    match_us: float
    place_us: float
    """Match, rank and reserve."""
    decide_us: float
    """Hash, match, rank and reserve."""
    decide_p99_us: float
    bytes_per_block: float
    """Router memory of the fingerprints per resident block and replica."""
    overestimate_blocks: float
    """How much too long a match is, mean over prompts and replicas."""
    apply_blocks_per_s: float
    """Block events (stored or removed) taken in per second, from encoded updates."""


class _Fleet:
    """A placement with full fingerprints, and the prompts to place."""

    def __init__(self, bench: RouteBench) -> None:
        self.bench = bench
        self.rng = np.random.default_rng(bench.seed)
        self.placement = Placement(block_size=bench.block_size)
        self.hasher = PrefixHasher(b"warmroute bench route")
        self.root = self.hasher.root(Namespace(model="bench"))
        self.geometry = FilterGeometry.for_blocks(bench.blocks)
        full = max(1, bench.tokens // bench.block_size)
        self.system_blocks = max(1, full // 8)
        shape = (_SYSTEMS, self.system_blocks * bench.block_size)
        self.systems = self.rng.integers(0, 50_000, shape, dtype=np.int32)
        self.prompts = [self._prompt(self.systems[i % _SYSTEMS]) for i in range(_PROMPTS)]
        self.true_depths = np.zeros((_PROMPTS, bench.replicas), dtype=np.int64)
        self._join()
        self._occupy()

    def hashes(self, prompt: int) -> Hashes:
        """Prefix hashes of a prompt."""
        return self.hasher.block_hashes(self.prompts[prompt], self.bench.block_size, self.root)

    def _prompt(self, system: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        rest = self.rng.integers(0, 50_000, self.bench.tokens, dtype=np.int32)
        return np.concatenate([system, rest])[: self.bench.tokens]

    def _join(self) -> None:
        """Fill every replica: a base of random blocks, and its part of the prompts."""
        bases = [self._snapshot(base) for base in range(min(_BASES, self.bench.replicas))]
        held = self._held()
        for replica in range(self.bench.replicas):
            name = f"replica-{replica}"
            self.placement.join(name)
            snapshot = bases[replica % len(bases)]
            self.placement.update(name, snapshot)
            rows = np.unique(self.geometry.rows_of(np.concatenate(held[replica])))
            rows = np.setdiff1d(rows, snapshot.set_rows, assume_unique=True)
            self.placement.update(name, _following(snapshot, rows), self._load())

    def _snapshot(self, base: int) -> FingerprintUpdate:
        blocks = self.rng.integers(0, 1 << 64, self.bench.blocks, dtype=np.uint64)
        rows = np.unique(self.geometry.rows_of(blocks)).astype(np.uint32)
        return FingerprintUpdate(base + 1, 0, 1, self.geometry, True, rows, column_digest(rows))

    def _held(self) -> list[list[Hashes]]:
        """Draw which replica holds how much of which prompt."""
        held = [[np.empty(0, dtype=np.uint64)] for _ in range(self.bench.replicas)]
        for prompt in range(_PROMPTS):
            hashes = self.hashes(prompt)
            depths = np.where(np.arange(self.bench.replicas) % 2 == prompt % 2, len(hashes) // 8, 0)
            holders = self.rng.choice(self.bench.replicas, min(3, self.bench.replicas), replace=False)
            depths[holders] = self.rng.integers(len(hashes) // 4, len(hashes) + 1, len(holders))
            self.true_depths[prompt] = depths
            for replica in depths.nonzero()[0].tolist():
                held[replica].append(hashes[: depths[replica]])
        for system in range(_SYSTEMS):  # one prompt's part holds the system prompt for all that begin with it
            depths = self.true_depths[system::_SYSTEMS]
            np.maximum(depths, np.minimum(depths.max(axis=0), self.system_blocks), out=depths)
        return held

    def _load(self) -> dict[str, Any]:
        waiting = int(self.rng.integers(0, 4))
        return {
            "waiting": waiting, "running": int(self.rng.integers(0, 16)), "waiting_tokens": 2000 * waiting,
            "free": 0, "cached": self.bench.blocks, "held": 0, "num_blocks": self.bench.blocks,
            "eviction_age_s": float(self.rng.uniform(50, 500)),
            "prefill_tokens_per_s": 20_000.0, "decode_step_s": 0.02,
        }  # fmt: skip

    def _occupy(self) -> None:
        """Two requests in flight per replica, with histories of their own."""
        for i in range(2 * self.bench.replicas):
            prompt = self._prompt(self.systems[i % _SYSTEMS])
            hashes = self.hasher.block_hashes(prompt, self.bench.block_size, self.root)
            self.placement.place(hashes, self.bench.tokens)


def _following(snapshot: FingerprintUpdate, rows: npt.NDArray[np.int64]) -> FingerprintUpdate:
    """The update that sets more rows on top of a snapshot."""
    digest = (snapshot.digest + column_digest(rows)) % (1 << 64)
    return FingerprintUpdate(
        epoch=snapshot.epoch, base_seq=snapshot.seq, seq=snapshot.seq + 1, geometry=snapshot.geometry,
        snapshot=False, set_rows=rows.astype(np.uint32), digest=digest,
    )  # fmt: skip


def run_bench(bench: RouteBench) -> RouteResult:
    """Build the fleet and time it; a few seconds at the default size."""
    fleet = _Fleet(bench)
    placement = fleet.placement
    hashed = [fleet.hashes(prompt) for prompt in range(_PROMPTS)]

    def place(hashes: Hashes) -> Callable[[], None]:
        decision = placement.place(hashes, bench.tokens)
        return lambda: placement.finish(decision.reservation)

    match_s = _times(bench, lambda i: placement.fingerprints.match(hashed[i]))
    hash_s = _times(bench, lambda i: fleet.hashes(i))
    place_s = _times(bench, lambda i: place(hashed[i]))
    decide_s = _times(bench, lambda i: place(fleet.hashes(i)))
    over = [placement.fingerprints.match(h)[: bench.replicas] for h in hashed] - fleet.true_depths
    return RouteResult(
        replicas=bench.replicas,
        tokens=bench.tokens,
        blocks=bench.blocks,
        hash_us=_percentile_us(hash_s, 50),
        match_us=_percentile_us(match_s, 50),
        place_us=_percentile_us(place_s, 50),
        decide_us=_percentile_us(decide_s, 50),
        decide_p99_us=_percentile_us(decide_s, 99),
        bytes_per_block=placement.fingerprints.nbytes / (bench.replicas * bench.blocks),
        overestimate_blocks=float(over.mean()),
        apply_blocks_per_s=_apply_rate(fleet),
    )


def _times(bench: RouteBench, action: Callable[[int], Any]) -> list[float]:
    """Seconds of each call, over all prompts in turn; a callable that comes back is run untimed."""
    times = []
    for i in range(_WARM_UP + bench.decisions):
        began = time.perf_counter()
        undo = action(i % _PROMPTS)
        times.append(time.perf_counter() - began)
        if callable(undo):
            undo()
    return times[_WARM_UP:]


def _percentile_us(times: list[float], q: float) -> float:
    return round(float(np.percentile(times, q)) * 1e6, 2)


def _apply_rate(fleet: _Fleet, events: int = 100_000, batch: int = 1000) -> float:
    """Decode and apply so many block events, half stored and half removed, in updates of `batch`."""
    fleet.placement.join("events")
    updates = list(_event_updates(fleet, events, batch))
    began = time.perf_counter()
    for data in updates:
        applied = fleet.placement.update("events", FingerprintUpdate.decode(data))
        assert applied, "an update of the benchmark was refused"
    return round(events / (time.perf_counter() - began))


def _event_updates(fleet: _Fleet, events: int, batch: int) -> Iterator[bytes]:
    counting = CountingFilter(fleet.geometry)
    blocks = fleet.rng.integers(0, 1 << 64, (events // batch + 1, batch // 2), dtype=np.uint64)
    rows = counting.add(blocks[0]).astype(np.uint32)
    first = FingerprintUpdate(1, 0, 0, fleet.geometry, True, rows, counting.digest)
    fleet.placement.update("events", first)
    for seq in range(events // batch):
        added, removed = counting.add(blocks[seq + 1]), counting.remove(blocks[seq])
        update = FingerprintUpdate(
            epoch=1, base_seq=seq, seq=seq + 1, geometry=fleet.geometry, snapshot=False,
            set_rows=np.setdiff1d(added, removed).astype(np.uint32), digest=counting.digest,
            cleared_rows=np.setdiff1d(removed, added).astype(np.uint32),
        )  # fmt: skip
        yield update.encode()


def route(
    replicas: Annotated[int, typer.Option(min=1, help="Replicas in the fleet.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 8192,
    blocks: Annotated[int, typer.Option(min=1, help="Resident blocks per replica.")] = 100_000,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    decisions: Annotated[int, typer.Option(min=1, help="Timed calls per figure.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of prompts and caches.")] = 0,
    json_path: Annotated[
        str | None, typer.Option("--json", help="Write the result as JSON to this file, or - for stdout.")
    ] = None,
) -> None:
    """Time a routing decision: hash, match, rank and reserve."""
    if json_path not in (None, "-"):
        path = Path(str(json_path)).absolute()
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else "no such folder"
            raise typer.BadParameter(f"{json_path}: {what}", param_hint="--json")
    result = run_bench(RouteBench(replicas, tokens, blocks, block_size, decisions, seed))
    _print_table(result, Console(stderr=json_path == "-"))
    line = json.dumps(asdict(result))
    if json_path is not None and json_path != "-":
        Path(json_path).write_text(line + "\n")
    else:
        sys.stdout.write(line + "\n")


def _print_table(result: RouteResult, console: Console) -> None:
    table = Table(title=f"one decision: {result.tokens} tokens, {result.replicas} replicas")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in asdict(result).items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)
