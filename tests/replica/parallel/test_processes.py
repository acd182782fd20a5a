"""Real processes: what they compute together, and what becomes of them when one of them fails."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from replica.batch import ForwardBatch
from replica.build import build_engine
from replica.config import EngineConfig
from replica.errors import ConfigError, EngineDead, ModelNotFound
from replica.models import load_model
from replica.parallel.follower import Task, command
from replica.parallel.launch import ChildProcesses, on_own_device
from replica.parallel.model import start
from replica.worker import EngineWorker
from tests.replica.test_hf_folders import save

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
CPU = {"device": "cpu", "dtype": "float32", "threads": 1}
TINY = {"model": "random:tiny", "block_size": 4, "num_blocks": 128, "hash_secret": b"secret"}
SETTINGS = {**CPU, **TINY}


class Kept:
    """Starts processes and keeps them where a test can see them."""

    def __call__(self, tasks):
        self.children = ChildProcesses([self.change(task) for task in tasks])
        self.processes = [psutil.Process(pid) for pid in self.children.pids.values()]
        return self.children

    def change(self, task):
        return task


def gone(processes):
    """Whether they end without anybody's help."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not alive


@pytest.fixture
def launch():
    kept = Kept()
    yield kept
    if hasattr(kept, "children"):
        kept.children.stop()


@pytest.fixture(scope="module")
def pair():
    """Overlapping, so that drawn tokens travel between the ranks, too."""
    engine = build_engine(EngineConfig(**SETTINGS, tensor_parallel=2, overlap=True))
    yield engine
    engine.close()


def forward(model, ids):
    model.allocate_kv(32, 4)
    table = np.array([5, 3, 9, 30, 1, 2, 7, 8])
    first = model.forward(ForwardBatch.build([(ids[:20], 0, table, 1)], 4))
    model.copy_blocks([(1, 11, 3), (5, 12, 4)])
    table[[0, 4]] = 12, 11
    second = model.forward(ForwardBatch.build([(ids[19:20], 19, table, 1), (ids[:9], 0, table + 13, 2)], 4))
    unknown = ForwardBatch.build([(np.array([-2]), 20, table, 1)], 4)
    third = model.forward(unknown, torch.tensor([3, int(ids[20])]))
    return torch.cat((first, second, third))


def test_logits_with_biases_and_norms_of_heads(tmp_path, launch):
    save(tmp_path, "Qwen3", {"head_dim": 12, "attention_bias": True})
    config = EngineConfig(model=str(tmp_path), **CPU, tensor_parallel=2)
    whole, facts = load_model(str(tmp_path))
    parts = start(config, torch.float32, launch)
    ids = np.arange(41) * 31 % 97
    assert torch.allclose(forward(parts, ids), forward(whole, ids), atol=2e-5, rtol=0)
    assert parts.config == facts
    assert parts.kv_block_bytes(4) * 2 == whole.kv_block_bytes(4)
    assert [process.is_running() for process in launch.processes] == [True]
    parts.close()
    assert not any(process.is_running() for process in launch.processes)


PROMPTS = [[(7 * i * k) % 250 + 3 for i in range(1, 40)] for k in (1, 2, 3)]


def requests(ask):
    """Prefixes in common, several choices that fork one prompt, seeded draws."""
    a, b, c = PROMPTS
    yield [ask("a", a), ask("b", b, n=3, temperature=1.0, seed=5), ask("c", c, max_tokens=20)]
    yield [ask("d", a[:30] + b), ask("e", a, n=2, temperature=0.7, seed=1), ask("f", b[:17] + c[17:])]
    yield [ask("g", c, use_beam_search=True, n=3, best_of=3), ask("h", a[:38])]


def test_the_engine_answers_as_with_one_process(pair, tiny_engine, ask, run_all):
    alone = tiny_engine(**SETTINGS)
    for batch in requests(ask):
        together, expected = run_all(pair, batch), run_all(alone, batch)
        for name, result in expected.items():
            assert together[name].tokens == result.tokens, name
            assert together[name].usage == result.usage, name
    assert pair.cache.stats().hit_tokens == alone.cache.stats().hit_tokens > 100
    pair.cache.check()


def test_four_processes_share_two_kv_heads_until_the_first_fails(ask, run_all, tiny_engine, launch):
    engine = build_engine(EngineConfig(**SETTINGS, tensor_parallel=4), launch)
    batch = next(iter(requests(ask)))
    expected = run_all(tiny_engine(**SETTINGS), batch)
    results = run_all(engine, batch)
    assert {name: result.tokens for name, result in results.items()} == {
        name: result.tokens for name, result in expected.items()
    }
    with pytest.raises(EngineDead, match="broke down: rank 0 failed: IndexError"):
        engine._model.forward(ForwardBatch.build([(np.array([1000]), 0, np.array([0]), 0)], 4))
    assert not any(process.is_running() for process in launch.processes)


@pytest.mark.parametrize("device, expected", [("cpu", "cpu"), ("cuda", "cuda:2"), ("cuda:3", "cuda:5")])
def test_each_child_has_its_own_device(device, expected):
    task = Task(2, 4, 1234, "random:tiny", "float32", device, None, 60.0)
    assert json.loads(command(on_own_device(task))[-1])["device"] == expected


def test_layouts_are_kept_apart(pair, tiny_engine):
    assert pair.facts.layout == "float32-b4-tp2"
    assert tiny_engine().facts.layout == "float32-b4"


async def test_a_rank_killed_while_it_computes(launch, ask):
    engine = build_engine(EngineConfig(**SETTINGS, tensor_parallel=2), launch)
    worker = EngineWorker(engine)
    worker.start()
    (follower,) = launch.processes
    chunks = []
    async for chunk in worker.generate(ask("r", PROMPTS[0], max_tokens=400)):
        if not chunks:
            follower.kill()
        chunks.append(chunk)
    assert chunks[0]["type"] == "start"
    assert (chunks[-1]["type"], chunks[-1]["code"]) == ("error", "unavailable")
    assert chunks[-1]["message"] == "tensor parallelism broke down: rank 1 ended with exit code -9"
    assert not worker.health()
    with pytest.raises(EngineDead, match="rank 1 ended"):
        engine._model.copy_blocks([(0, 1, 1)])
    worker.stop()


def test_a_rank_that_hangs_costs_the_timeout_and_is_ended(launch, ask):
    config = EngineConfig(**SETTINGS, tensor_parallel=2, parallel_timeout_s=0.5)
    engine = build_engine(config, launch)
    (follower,) = launch.processes
    follower.send_signal(signal.SIGSTOP)
    engine.add(ask("r", PROMPTS[0]))
    with pytest.raises(EngineDead, match=r"another rank has gone or does not answer: .*Timed out"):
        engine.step()
    assert not follower.is_running()


def test_the_first_rank_killed_takes_the_others_with_it():
    program = (
        "import sys, time\n"
        "from replica.build import build_engine\n"
        "from replica.config import EngineConfig\n"
        f"engine = build_engine(EngineConfig(**{SETTINGS}, tensor_parallel=2))\n"
        "print(*engine._model._followers.pids.values(), flush=True)\n"
        "time.sleep(600)\n"
    )
    paths = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    ) as first:
        followers = [psutil.Process(int(pid)) for pid in first.stdout.readline().split()]
        first.kill()
    assert len(followers) == 1
    assert gone(followers)


class OtherModel(Kept):
    """Gives the other ranks another model than rank 0's."""

    def __init__(self, model):
        self.model = model

    def change(self, task):
        return replace(task, model=self.model)


def test_a_rank_that_cannot_load_its_part():
    config = EngineConfig(**SETTINGS, tensor_parallel=2)
    launch = OtherModel("no/such/model")
    with pytest.raises(
        EngineDead, match="could not start: rank 1 failed: ModelNotFound: no model 'no/such/mo"
    ):
        start(config, torch.float32, launch)
    assert not any(process.is_running() for process in launch.processes)


def test_no_rank_stays_when_the_engine_cannot_be_built(tmp_path, launch):
    save(tmp_path, "Llama", {})  # a model without a tokenizer
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        build_engine(EngineConfig(model=str(tmp_path), **CPU, tensor_parallel=2), launch)
    assert not any(process.is_running() for process in launch.processes)


def test_an_error_in_one_rank_is_told_and_ends_all(tmp_path):
    """Rank 1's embedding is too short for a token that rank 0 has."""
    for name, vocab in (("all", 97), ("less", 90)):
        save(tmp_path / name, "Llama", {"vocab_size": vocab, "tie_word_embeddings": False})
    launch = OtherModel(str(tmp_path / "less"))
    config = EngineConfig(model=str(tmp_path / "all"), **CPU, tensor_parallel=2)
    model = start(config, torch.float32, launch)
    model.allocate_kv(4, 4)
    batch = ForwardBatch.build([(np.array([95, 3]), 0, np.array([0]), 0)], 4)
    for _ in range(2):
        with pytest.raises(EngineDead, match="broke down: rank 1 failed: IndexError"):
            model.forward(batch)
    assert not any(process.is_running() for process in launch.processes)


def test_ranks_without_a_gpu_each_are_not_started():
    task = Task(63, 64, 1, "random:tiny", "float16", "cuda:0", None, 1.0)
    with pytest.raises(
        ConfigError, match="tensor_parallel 2 needs GPUs up to cuda:63, a rank each; torch finds"
    ):
        ChildProcesses([task])


def test_settings_that_cannot_work(launch):
    with pytest.raises(ConfigError, match="tensor_parallel 3 does not divide the model's 4 attention heads"):
        build_engine(EngineConfig(**SETTINGS, tensor_parallel=3), launch)
    assert not hasattr(launch, "children")
    with pytest.raises(ConfigError, match="tensor_parallel must be at least 1, not 0"):
        EngineConfig(**SETTINGS, tensor_parallel=0)
    with pytest.raises(ConfigError, match=r"parallel_timeout_s must be above 0 .*, not 0"):
        EngineConfig(**SETTINGS, parallel_timeout_s=0)
