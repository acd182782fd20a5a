"""Prefill and decode of the engine beside `transformers` generate: same weights, prompts, threads and run.

    python benchmarks/engine_vs_transformers.py --threads 2

Prints a table, then one JSON object as the last line. Repeats of the two take turns, so that a busy machine
slows both; figures are medians. Prompts of a batch have equal lengths, which spares transformers all padding,
and the engine neither reads nor fills its prefix cache. The last row is a whole job as it comes in practice:
prompts and answers of mixed lengths, eight at a time; transformers pads, and each of its batches lasts as
long as its longest answer. Needs `transformers`.
"""

import argparse
import json
import statistics
import time
from collections import deque

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from replica.build import build_engine
from replica.config import EngineConfig
from replica.gguf_file import GgufFile
from replica.models import resolve
from replica.request import Request, SamplingParams
from replica.weights_gguf import GgufWeights, gguf_config

MIXED_REQUESTS, MIXED_BATCH = 24, 8
MIXED_PROMPT, MIXED_ANSWER = (16, 128), (8, 128)
CASES = (("prefill", 1), ("decode", 1), ("decode", 8))


def peer_model(name):
    """The same weights in transformers' own model."""
    path = resolve(name)
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    file = GgufFile(path)
    shape = gguf_config(file)
    weights = GgufWeights(file, shape)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        max_position_embeddings=shape.context_length,
    )
    model = LlamaForCausalLM(config).eval()
    state = {key: weights.get(key) for key in model.state_dict()}
    if state["lm_head.weight"] is None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict({key: value.float() for key, value in state.items()})
    return model


class Peer:
    """transformers: generate() of 1 token is the prefill; what more tokens take on top is the decode."""

    name = "transformers"

    def __init__(self, model):
        self.model = model

    def generate(self, prompts, count):
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return time.perf_counter() - started, out[:, longest:].tolist()

    def seconds(self, kind, prompts, count):
        """(seconds, tokens counted, tokens generated)"""
        first, tokens = self.generate(prompts, 1)
        if kind == "prefill":
            return first, prompts.size, tokens
        whole, tokens = self.generate(prompts, count + 1)
        return whole - first, len(prompts) * count, tokens

    def job(self, prompts, counts):
        """Seconds and tokens of a job of mixed lengths, in batches of its order."""
        whole, answers = 0.0, []
        for at in range(0, len(prompts), MIXED_BATCH):
            part = slice(at, at + MIXED_BATCH)
            seconds, tokens = self.generate(prompts[part], max(counts[part]))
            whole += seconds
            answers += [row[:count] for row, count in zip(tokens, counts[part], strict=True)]
        return whole, answers


class Ours:
    """The engine: the decode begins when every prompt of the batch has its first token."""

    name = "warmroute"

    def __init__(self, engine):
        self.engine = engine

    def seconds(self, kind, prompts, count):
        """(seconds, tokens counted, tokens generated)"""
        length = 1 if kind == "prefill" else count + 1
        sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        started = begun = time.perf_counter()
        for i, prompt in enumerate(prompts):
            self.engine.add(Request(str(i), prompt, sampling, read=False, publish=False))
        tokens = [[] for _ in prompts]
        early = 0
        while self.engine.has_work():
            for output in self.engine.step():
                tokens[int(output.request_id)].extend(output.tokens)
            if begun == started and all(tokens):
                begun, early = time.perf_counter(), sum(map(len, tokens))
        ended = time.perf_counter()
        if kind == "prefill":
            return ended - started, prompts.size, tokens
        return ended - begun, sum(map(len, tokens)) - early, tokens

    def job(self, prompts, counts):
        """Seconds and tokens of a job of mixed lengths; at most a batch is in the engine at a time."""
        started, tokens = time.perf_counter(), [[] for _ in prompts]
        todo = deque(enumerate(zip(prompts, counts, strict=True)))
        running = 0
        while todo or running:
            while todo and running < MIXED_BATCH:
                number, (prompt, count) = todo.popleft()
                sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                self.engine.add(Request(str(number), prompt, sampling, read=False, publish=False))
                running += 1
            for output in self.engine.step():
                tokens[int(output.request_id)].extend(output.tokens)
                running -= output.last
        return time.perf_counter() - started, tokens


def row(rates, tokens):
    """Medians of both sides, their ratio, and whether they said the same."""
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "warmroute_tokens_per_s": round(medians["warmroute"], 1),
        "transformers_tokens_per_s": round(medians["transformers"], 1),
        "ratio": round(medians["warmroute"] / medians["transformers"], 2),
        "same_tokens": tokens["warmroute"] == tokens["transformers"],
    }


def mixed(sides, repeats, vocab_size):
    """Answer tokens per second of a whole job, prefill included."""
    random = np.random.default_rng(1)
    lengths = random.integers(*MIXED_PROMPT, MIXED_REQUESTS)
    prompts = [random.integers(20, vocab_size, length).astype(np.int32) for length in lengths]
    counts = random.integers(*MIXED_ANSWER, MIXED_REQUESTS).tolist()
    rates, tokens = {side.name: [] for side in sides}, {}
    for _ in range(repeats):
        for side in sides:
            seconds, tokens[side.name] = side.job(prompts, counts)
            rates[side.name].append(sum(counts) / seconds)
    return row(rates, tokens)


def measure(args):
    engine = build_engine(
        EngineConfig(model=args.model, num_blocks=1024, max_model_len=4096, hash_secret=b"bench")
    )
    sides = [Ours(engine), Peer(peer_model(args.model))]
    random = np.random.default_rng(0)
    results = {}
    for kind, batch in CASES:
        length = args.prefill_tokens if kind == "prefill" else args.prompt_tokens
        prompts = random.integers(20, engine.vocab_size, (batch, length)).astype(np.int32)
        rates, tokens = {side.name: [] for side in sides}, {}
        for side in sides:
            side.seconds(kind, prompts, 2)  # the first pass pays for lazy initialisation
        for _ in range(args.repeats):
            for side in sides:
                seconds, counted, tokens[side.name] = side.seconds(kind, prompts, args.decode_tokens)
                rates[side.name].append(counted / seconds)
        results[f"{kind}_{batch}"] = row(rates, tokens)
    results[f"mixed_{MIXED_BATCH}"] = mixed(sides, args.repeats, engine.vocab_size)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt in the decode cases")
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = measure(args)
    table = Table(title=f"{args.model}, {args.threads} threads, tokens/s")
    for column in ("", "warmroute", "transformers", "ratio", "same tokens"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in results.items():
        table.add_row(name.replace("_", ", batch "), *(str(value) for value in found.values()))
    Console().print(table)
    print(json.dumps({"model": args.model, "threads": args.threads, **results}))


if __name__ == "__main__":
    main()
