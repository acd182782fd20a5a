"""Dynamo's side of `simulate_vs_mocker.py`: runs in the interpreter that has `ai-dynamo-runtime`.

Reads a JSON object on stdin, writes one on stdout:

    {"trace": path, "workers": n, "trace_block_size": n, "engine": {...}, "runs": [[router mode, speed], ...]}
    {"version": "1.6.1", "engine": {...}, "runs": [{"hit_rate": share, "ttft_ms": mean, "e2e_ms": mean}, ...]}

`engine` goes to the mocker as it is; what comes back is that with the mocker's defaults. Nothing of this
repository is imported here.
"""

import json
import sys
from importlib.metadata import version

from dynamo._core import _normalize_mocker_config, run_mocker_trace_replay


def replay(order, mode, speed):
    engine = {**order["engine"], "emit_kv_events": mode == "kv_router"}
    result = run_mocker_trace_replay(
        [order["trace"]],
        extra_engine_args={"engine": engine},
        num_workers=order["workers"],
        router_mode=mode,
        arrival_speedup_ratio=speed,
        trace_block_size=order["trace_block_size"],
    ).summary
    return {
        "requests": result["completed_requests"],
        "prompt_tokens": result["total_input_tokens"],
        "hit_rate": result["first_admission_prefix_cache_reused_ratio"],
        "ttft_ms": result["mean_ttft_ms"],
        "e2e_ms": result["mean_e2e_latency_ms"],
    }


def main():
    order = json.load(sys.stdin)
    runs = [replay(order, mode, speed) for mode, speed in order["runs"]]
    engine = _normalize_mocker_config({"engine": order["engine"]})["engine"]
    json.dump({"version": version("ai-dynamo-runtime"), "engine": engine, "runs": runs}, sys.stdout)


if __name__ == "__main__":
    main()
