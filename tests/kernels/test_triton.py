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


def test_the_engine_benchmark_runs_in_small():
    report = json.loads(
        run("benchmarks/gpu.py", "--tiny", "--only", "engine", interpret="1").splitlines()[-1]
    )
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
