"""The Triton kernels without a GPU: their tests in its interpreter, compiled for three GPUs, timed in small.

Each in a process of its own: whether kernels are interpreted is settled when Triton is first imported.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import ops

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "kernels.md"


def run(*command, interpret):
    """Standard output of a Python program at the repository's root."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_INTERPRET": interpret,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests are collected and run on the GPU")
def test_interpreted():
    out = run("-m", "pytest", "tests/kernels/triton", "-p", "no:cacheprovider", interpret="1")
    assert " passed" in out and "skipped" not in out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_for_three_gpus_without_spills():
    out = run("benchmarks/kernel_resources.py", "--quick", interpret="0")
    rows = json.loads(out.splitlines()[-1])["kernels"]
    assert {row["arch"] for row in rows} == {80, 90, 100}
    assert [row for row in rows if row["spilled"]] == []
    # One that needs 2-byte accesses where 16 bytes lie side by side has lost what it knew of its addresses.
    narrow = {row["kernel"] for row in rows if row["wide"] == 0}
    assert narrow <= {"rope_kernel", "prefix_hash_kernel"}
    # What a multiprocessor has, of the oldest that each set of tiles is for (8.6 and 8.9 have 99 KiB).
    room = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
    assert [row for row in rows if row["shared"] > room[row["arch"]]] == []
    documented = DOCS.read_text()
    assert [row for row in rows if f"| {row['case']} | `{row['kernel']}` |" not in documented] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs in full, by hand")
def test_the_gpu_benchmark_runs_in_small():
    report = json.loads(run("benchmarks/gpu.py", "--tiny", "--tune", interpret="1").splitlines()[-1])
    assert all(check["passed"] for check in report["checks"])
    assert {row["name"] for row in report["timings"]} > {"rms_norm", "sample", "block_copy"}
    assert report["tiles"]


# Every kernel that steps of different sizes launch, and as how many different programs.
STEPS = """
import json, sys
sys.path[0] = "benchmarks"
import dataclasses, torch, kernel_cases as cases, kernel_inputs as inputs, kernel_resources as resources
from triton.runtime.jit import JITFunction
from kernels import triton as fast
found = {}
def record(self, *args, grid, warmup, **kwargs):
    found.setdefault(self.__name__, set()).add(repr(resources.described(self, args, kwargs)))
JITFunction.run = record
device, dtype = torch.device("cpu"), torch.bfloat16
for rows, context in ((1, 600), (3, 768), (16, 8192)):
    size = dataclasses.replace(inputs.CHECK, rows=rows, batch=rows, context=context, kv_heads=2, heads=8)
    for case in (
        cases.decode(size, device, dtype), cases.prefill(size, device, dtype, lens=[(rows + 1, context)]),
        cases.rope_kv_write(size, device, dtype), cases.rms_norm(size, device, dtype),
        cases.add_rms_norm(size, device, dtype), cases.silu_mul(size, device, dtype),
        cases.sample(size, device),
    ):
        case.run()
    cache = torch.zeros(40, 16, 2, 64, dtype=dtype)
    fast.block_copies(fast.layers_of([(cache, cache.clone())]), [(i, 20 + i, 5) for i in range(rows)])
print(json.dumps({name: len(programs) for name, programs in found.items()}))
"""


def test_nothing_is_compiled_for_another_size_of_step():
    programs = json.loads(run("-c", STEPS, interpret="0").splitlines()[-1])
    assert programs == dict.fromkeys(
        [
            "decode_kernel", "join_kernel", "prefill_kernel", "rope_kernel", "rms_norm_kernel",
            "silu_mul_kernel", "sample_kernel", "copy_kernel",
        ],
        1,
    ) | {"rms_norm_kernel": 2}  # fmt: skip


# What is launched for steps of every kind and was not for a rehearsal: passes compute nothing here.
REHEARSED = """
import json, sys
sys.path[0] = "benchmarks"
import numpy as np, torch, kernel_resources as resources
from triton.runtime.jit import JITFunction
from replica.assemble import rehearse
from replica.batch import ForwardBatch
from replica.models import load_model
found = {}
def record(self, *args, grid, warmup, **kwargs):
    found.setdefault(repr(resources.described(self, args, kwargs)), self.__name__)
JITFunction.run = record
model, _ = load_model("random:tiny", torch.bfloat16, "cpu")
model.allocate_kv(128, 16)
rehearse(model, 16, 2048)
known = len(found)
mixed = [(300, 300), (1, 700), (16, 2000), (1, 1)]
for lens in ([(1, 3)], [(1, 40)] * 3, [(1, 600), (1, 2)], [(33, 40)], mixed):
    model.forward(ForwardBatch.build(
        [(np.zeros(new), end - new, np.arange(-(-end // 16)), 1) for new, end in lens], 16
    ))
model.copy_blocks([(1, 2, 3), (3, 4, 16), (5, 6, 1)])
print(json.dumps([known, list(found.values())[known:]]))
"""


def test_all_kinds_of_steps_are_rehearsed(monkeypatch):
    monkeypatch.setenv("WARMROUTE_KERNELS", "triton")
    known, late = json.loads(run("-c", REHEARSED, interpret="0").splitlines()[-1])
    # Norms of one sum and of none, rotary embedding, SwiGLU, attention three ways and a join, a copy.
    assert (known, late) == (9, [])


# Runs a file with arguments where the packages named first cannot be imported.
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
sys.path[0], sys.argv[:2] = "benchmarks", []
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_engine_benchmark_runs_in_small_where_there_is_little_but_torch():
    missing = "fastapi,gguf,httpx,jinja2,pydantic,ray,rich,safetensors,tokenizers,transformers,typer,yaml"
    out = run("-c", WITHOUT, missing, "benchmarks/gpu.py", "--tiny", "--only", "engine", interpret="1")
    report = json.loads(out.splitlines()[-1])
    rows = {row["name"]: row for row in report["engine"]}
    assert rows.keys() == {
        *(f"decode, batch {n}{how}" for n in (1, 3) for how in ("", ", no graphs", ", no overlap")),
        "first token, 64 tokens",
        "first token, 48 of 64 cached",
    }
    assert all(row["ms"] > 0 for row in rows.values())
    assert "checks" not in report and "timings" not in report


def test_chosen_for_cuda():
    gpu = torch.device("cuda")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert ops.select(gpu, dtype).__name__ == "kernels.triton"
    assert ops.select(gpu, torch.float64).__name__ == "kernels.reference"
    assert ops.select(torch.device("cpu"), torch.bfloat16).__name__ == "kernels.reference"


def test_without_triton_the_reference_takes_over(monkeypatch, caplog):
    for name in [name for name in sys.modules if name.startswith("kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, "kernels.ops"):
        found = ops.select(torch.device("cuda"), torch.bfloat16)
    assert found.__name__ == "kernels.reference"
    assert "kernels.triton cannot be used, kernels.reference is, slower" in caplog.text


def test_not_for_float64(monkeypatch):
    monkeypatch.setenv("WARMROUTE_KERNELS", "triton")
    with pytest.raises(ValueError, match="16-bit and 32-bit"):
        ops.select(torch.device("cuda"), torch.float64)
