"""A replica of several processes on Ray: the answers of one, and nothing left of it afterwards."""

import os
import signal
from collections.abc import Iterator

import httpx
import numpy as np
import psutil
import pytest
from ray import serve

from replica.build import build_engine
from replica.config import EngineConfig
from replica.models import load_tokenizer
from replica.request import Request, SamplingParams
from router.app import build
from router.config import AppConfig

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.slow]

MODEL, NAME, BLOCKS = "random:tiny", "parallel", {"block_size": 4, "num_blocks": 256}
PROMPTS = ["Two ranks share the heads of a model.", "Two ranks share the heads of a model, and the MLP."]


def ranks() -> list[int]:
    """Process ids of the actors that are other ranks."""
    named = ((p.pid, p.info["cmdline"] or [""]) for p in psutil.process_iter(["cmdline"]))
    return [pid for pid, command in named if command[0].startswith("ray::Rank")]


@pytest.fixture(scope="module")
def url(endpoint) -> Iterator[str]:
    """One replica of two ranks with half a CPU each, beside the other tests' application."""
    config = AppConfig(model=MODEL, replicas=1, engine={"tensor_parallel": 2, **BLOCKS})
    serve.run(build(config), name=NAME, route_prefix=f"/{NAME}", blocking=False)
    url = f"{endpoint.url}/{NAME}"
    endpoint.wait_for(lambda: healthy(url), 60, "the parallel replica answers")
    yield url
    serve.delete(NAME)
    endpoint.wait_for(lambda: ranks() == [], 20, "no rank is left")


def healthy(url: str) -> bool:
    answer = httpx.get(f"{url}/health", timeout=5)
    return answer.status_code == 200 and answer.json().get("replicas") == 1


def complete(url: str, prompt: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def of_one_process() -> list[str]:
    engine = build_engine(EngineConfig(model=MODEL, hash_secret=b"secret", **BLOCKS))
    tokenizer, texts = load_tokenizer(MODEL), []
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    for name, prompt in enumerate(PROMPTS):
        engine.add(Request(str(name), np.array(tokenizer.encode_text(prompt), dtype=np.int32), sampling))
        texts.append("")
        while engine.has_work():
            texts[-1] += "".join(output.text for output in engine.step())
    return texts


def test_two_ranks_answer_as_one_process(url) -> None:
    answers = [complete(url, prompt).json() for prompt in PROMPTS]
    assert [answer["choices"][0]["text"] for answer in answers] == of_one_process()
    assert [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers] == [0, len(PROMPTS[0]) - 1]
    assert len(ranks()) == 1


def test_a_replica_that_loses_a_rank_is_replaced(url, endpoint) -> None:
    (before,) = ranks()
    os.kill(before, signal.SIGKILL)
    endpoint.wait_for(lambda: ranks() not in ([], [before]), 60, "another rank was started")
    endpoint.wait_for(lambda: healthy(url) and complete(url, PROMPTS[0]).status_code == 200, 60, "it answers")
