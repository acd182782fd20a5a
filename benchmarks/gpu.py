"""Checks every Triton kernel against float64 on this GPU, then times it beside what the GPU can do.

    PYTHONPATH=. python benchmarks/gpu.py                    # checks, then times
    PYTHONPATH=. python benchmarks/gpu.py --only checks      # or: --only timings
    PYTHONPATH=. python benchmarks/gpu.py --only engine      # the whole engine, random weights of an 8B shape
    PYTHONPATH=. python benchmarks/gpu.py --tune             # other tiles, too: a table for configs.py
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu.py --tiny --tune   # in small, without a GPU

Prints tables, then one JSON object as the last line. The exit status is 1 when a check fails, not when a
target is missed. Needs torch, triton and numpy only, the engine numba and msgpack, too; FlashInfer is timed
if it is there.

*share* is the least time over the measured one: for what moves memory, its bytes at the bandwidth of a plain
copy in the same run; for prefill, the time of torch's flash attention; for a prefix, this kernel's own time
without one, scaled by the number of scores.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from functools import partial

import kernel_cases as cases
import kernel_inputs as inputs
import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.errors import OutOfResources

from kernels.triton import configs

DIMS = (64, 80, 96, 256)  # checked beside the usual 128
DECODE_TARGET, COPY_TARGET, PREFILL_TARGET, PREFIX_TARGET = 0.85, 0.85, 0.9, 0.8
PREFIX = 7 / 8  # of a prompt

TILES = {
    "prefill": [
        configs.Tile(rows, keys, rows // 16, stages)
        for rows, keys, stages in itertools.product((64, 128), (32, 64, 128), (2, 3, 5))
    ],
    "decode": [configs.Tile(16, *t) for t in itertools.product((16, 32, 64, 128), (2, 4), (3, 5, 6))],
}
PIECES = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Timing:
    """One row of the table. `share` is `floor_ms / ms`, unless there is no floor."""

    name: str
    ms: float | None
    floor_ms: float | None = None
    target: float | None = None
    note: str = ""

    @property
    def share(self):
        return None if self.floor_ms is None or self.ms is None else self.floor_ms / self.ms


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("checks", "timings", "engine"))
    parser.add_argument("--tune", action="store_true", help="time other tiles of the attention kernels")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes; works on a CPU with TRITON_INTERPRET=1"
    )
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        parser.error("there is no GPU; --tiny with TRITON_INTERPRET=1 runs everything in small")
    report = {"gpu": gpu_name(device), "torch": torch.__version__, "triton": triton.__version__}
    size = inputs.TINY if arguments.tiny else inputs.FULL
    if arguments.only in (None, "checks"):
        report["checks"] = checks(device, arguments.tiny)
    if arguments.only in (None, "timings"):
        report |= timings(device, size)
    if arguments.only == "engine":
        report |= engine(device, size, arguments.tiny)
    if arguments.tune:
        report["tiles"] = tune(device, arguments.tiny)
    print(json.dumps(report))
    return int(not all(check["passed"] for check in report.get("checks", [])))


def gpu_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none (interpreted)"


def checks(device, tiny):
    """Every case against float64: name, dtype, error relative to the largest value, whether it will do."""
    size, found = inputs.TINY if tiny else inputs.CHECK, []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        dims = DIMS if dtype == torch.bfloat16 else ()
        for build in cases.builders(size, device, dtype, dims=dims):
            found.append(check(build, dtype))
            print(verdict(found[-1]), flush=True)
        if tiny:
            break
    return found


def check(build, dtype):
    """One case; what goes wrong fails it, and the others go on."""
    about = {"name": build.func.__name__, "dtype": str(dtype), "error": None, "passed": False}
    try:
        case = build()
        about["name"], worst = case.name, error(case)
        # JSON knows no infinity.
        return about | {"error": worst if math.isfinite(worst) else None, "passed": worst <= case.tolerance}
    except Exception:
        return about | {"problem": traceback.format_exc()}


def verdict(found):
    """A line about a check, and what went wrong."""
    size = "not finite" if found["error"] is None else f"{found['error']:.2g}"
    mark = "ok  " if found["passed"] else "FAIL"
    return f"{mark} {found['name']}, {found['dtype']}: error {found.get('problem', size)}"


def error(case):
    """The largest error of any output relative to that output's largest value; infinite for NaN."""
    expected, worst = case.truth(), 0.0
    for actual, right in zip(case.outputs(case.run()), expected, strict=True):
        if not actual.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(actual, right) else float("inf"))
            continue
        difference = (actual.double() - right.double()).abs().max() / right.double().abs().max()
        worst = max(worst, float(difference) if difference.isfinite() else float("inf"))
    return worst


def timings(device, size):
    """The table, and what it says, for JSON."""
    dtype = torch.bfloat16
    bandwidth = copy_bandwidth(device, size)
    rows = [*decode_rows(size, device, dtype, bandwidth), *prefill_rows(size, device, dtype)]
    for build in cases.small_builders(size, device, dtype):
        target = COPY_TARGET if build.func is cases.block_copy else None
        rows.append(moving(build, device, bandwidth, target))
    show(rows, bandwidth)
    return {
        "copy_bytes_per_s": bandwidth,
        "timings": [{**asdict(row), "share": row.share} for row in rows],
        "targets_met": {row.name: row.share >= row.target for row in rows if row.target and row.share},
    }


def engine(device, size, tiny):
    """The table of the whole engine, and what it says, for JSON."""
    from gpu_engine import measure

    bandwidth = copy_bandwidth(device, size)
    rows = [Timing(*row[:3], note=row[3]) for row in measure(device, tiny, bandwidth)]
    show(rows, bandwidth)
    figures = [{**asdict(row), "share": row.share} for row in rows]
    return {"copy_bytes_per_s": bandwidth, "engine": figures}


def milliseconds(run, device):
    """Median time of a call, with a cold L2 cache."""
    if device.type == "cuda":
        return triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median")
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def copy_bandwidth(device, size):
    """Bytes a second that a plain copy of 1 GiB reads and writes together."""
    source = torch.zeros(1 << 30 if size is inputs.FULL else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = statistics.median(milliseconds(lambda: target.copy_(source), device) for _ in range(3))
    return 2 * source.nbytes / ms * 1e3


def moving(build, device, bandwidth, target=None):
    """A kernel whose floor is its bytes."""
    name = build.func.__name__
    try:
        case = build()
        name, ms = case.name, milliseconds(case.run, device)
    except Exception as problem:
        return Timing(name, None, None, target, short(problem))
    return Timing(name, ms, case.moved / bandwidth * 1e3, target, f"{case.moved / ms / 1e6:,.0f} GB/s")


def decode_rows(size, device, dtype, bandwidth):
    plain = partial(cases.decode, size, device, dtype)
    lens = [size.context - i for i in range(size.batch)]
    peers = [("FlashInfer decode", flashinfer_decode), ("torch SDPA decode, not paged", torch_decode)]
    return [
        moving(plain, device, bandwidth, DECODE_TARGET),
        moving(partial(plain, float8=True), device, bandwidth),
        *(timed(name, lambda make=make: make(size, lens, device, dtype), device) for name, make in peers),
    ]


def timed(name, make, device):
    """The time of what `make` gives, or why there is none: nothing must end the run."""
    try:
        return Timing(name, milliseconds(make(), device))
    except Exception as problem:
        return Timing(name, None, note=short(problem))


def short(problem):
    return f"{type(problem).__name__}: {problem}"[:90]


def flashinfer_decode(size, lens, device, dtype):
    import flashinfer

    caches, _, seqs = inputs.paged([(1, n) for n in lens], size, device, dtype, size.dim, False)
    counts = [-(-n // size.page) for n in lens]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    blocks = torch.cat([row[:count] for row, count in zip(seqs.block_tables, counts, strict=True)])
    last = torch.tensor([(n - 1) % size.page + 1 for n in lens], dtype=torch.int32, device=device)
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
    shape = (size.heads, size.kv_heads, size.dim, size.page)
    wrapper.plan(starts, blocks.int().to(device), last, *shape, q_data_type=dtype, kv_data_type=dtype)
    q = inputs.normal(len(lens), size.heads, size.dim, device=device, dtype=dtype)
    return lambda: wrapper.run(q, tuple(caches))


def torch_decode(size, lens, device, dtype):
    shape = (len(lens), size.kv_heads, max(lens), size.dim)
    keys, values = (inputs.normal(*shape, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    q = inputs.normal(len(lens), size.heads, 1, size.dim, device=device, dtype=dtype)
    return lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def prefill_rows(size, device, dtype):
    """Without a prefix beside torch's flash attention; with one beside itself."""
    context = size.prefills[-1][1]
    cached = int(context * PREFIX)
    whole = cases.prefill(size, device, dtype, lens=[(context, context)])
    rest = cases.prefill(size, device, dtype, lens=[(context - cached, context)])
    flash = timed("torch SDPA flash", lambda: torch_prefill(size, [context], device, dtype), device)
    full = timed(f"{whole.name}, {context:,} new", lambda: whole.run, device)
    tail = timed(f"{rest.name}, {cached:,} cached, {context - cached:,} new", lambda: rest.run, device)
    ideal = full.ms and full.ms * rest.flops / whole.flops
    return [
        replace(full, floor_ms=flash.ms, target=PREFILL_TARGET, note=speed(whole, full)),
        flash,
        replace(tail, floor_ms=ideal, target=PREFIX_TARGET, note=speed(rest, tail)),
    ]


def speed(case, row):
    return row.note if row.ms is None else f"{case.flops / row.ms / 1e9:,.0f} TFLOP/s"


def torch_prefill(size, lens, device, dtype):
    q = inputs.normal(1, size.heads, lens[0], size.dim, device=device, dtype=dtype)
    keys, values = (
        inputs.normal(1, size.kv_heads, lens[0], size.dim, device=device, dtype=dtype, seed=seed)
        for seed in (1, 2)
    )

    def run():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)

    return run


def tune(device, tiny):
    """The fastest tile by kernel and head dimension, and the fastest piece of a decode."""
    size, found = inputs.TINY if tiny else inputs.FULL, {}
    for name, tiles in TILES.items():
        for dim in (64, 128, 256) if not tiny else (32,):
            case = getattr(cases, name)(size, device, torch.bfloat16, dim=dim)
            tried = tiles[:2] if tiny else tiles
            times = {
                tile: attempt(lambda case=case, tile=tile: case.run(tile=tile), device) for tile in tried
            }
            best = min(times, key=times.get)
            source = f"{times[best]:.3f} ms, {gpu_name(device)}"
            print(f"{name}, {configs.gpu_class(device)}: {dim}: {best},  # {source}")
            found[f"{name} {dim}"] = {**asdict(best), "ms": times[best]}
    case = cases.decode(replace(size, batch=min(size.batch, 8)), device, torch.bfloat16)
    for piece in PIECES:
        ms = attempt(lambda piece=piece: case.run(piece=piece), device)
        print(f"decode of {min(size.batch, 8)} sequences, pieces of {piece}: {ms:.3f} ms")
        found[f"piece {piece}"] = {"ms": ms}
    return found


def attempt(run, device):
    """Milliseconds; infinitely many for a tile that the GPU has no room for."""
    try:
        return milliseconds(run, device)
    except OutOfResources:
        return float("inf")


def show(rows, bandwidth):
    """In plain text: a lent machine may have nothing but torch."""
    print(f"a plain copy moves {bandwidth / 1e9:,.0f} GB/s")
    print(f"{'kernel':52} {'ms':>10} {'share':>6} {'target':>11}")
    for row in rows:
        ms = "" if row.ms is None else f"{row.ms:.3f}"
        share = "" if row.share is None else f"{row.share:.0%}"
        target = "" if row.target is None else f"{row.target:.0%}"
        if share and target:
            target += " met   " if row.share >= row.target else " MISSED"
        print(f"{row.name:52} {ms:>10} {share:>6} {target:>11}  {row.note}")


if __name__ == "__main__":
    sys.exit(main())
